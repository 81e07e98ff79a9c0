package offline

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// recordOf returns the portable form of a record. It shares memory with rec.
func recordOf(rec *record.Record) Record {
	r := Record{
		Attempts: rec.Attempts, Leases: rec.Leases, MaxAttempts: rec.MaxAttempts, LeaseFor: rec.Lease, Timeout: rec.Timeout,
		Retention: rec.Retention, RunAt: rec.RunAt, Group: rec.GroupKey, LimitKey: rec.LimitKey, Kind: rec.Kind,
		IsParent: rec.Parent, Expired: rec.Expired, Rewritten: rec.Rewritten, RetryFirst: rec.RetryFirst, HoldsTurn: rec.HoldsTurn,
		Crashes: rec.Crashes, Suspect: rec.Suspect,
		LastError: rec.Error, Headers: rec.Headers, OnDead: rec.OnDead, OnMissing: rec.OnMissing,
		History: rec.History, Notes: rec.Notes, Payload: rec.Payload,
	}
	if rec.Unique != [record.UniqueLen]byte{} {
		r.Unique = &uniqueLine{Key: rec.UniqueKey, Hash: rec.Unique[:], For: rec.UniqueFor, MaxWait: rec.MaxWait, Flags: rec.Flags}
	}
	for _, id := range rec.Parents {
		r.After = append(r.After, lineID(id))
	}
	return r
}

// maxName bounds the names that a queue takes, and the names of a record.
const maxName = 4096

// record returns the record of a task of a queue and tenant, with the parents of the line.
func (t *Template) record() (record.Record, error) {
	rec := record.Record{
		Head: record.Head{
			Attempts: t.Attempts, Leases: t.Leases, MaxAttempts: t.MaxAttempts, Lease: t.LeaseFor, Timeout: t.Timeout,
			Retention: t.Retention, RunAt: t.RunAt, Expired: t.Expired, Rewritten: t.Rewritten, RetryFirst: t.RetryFirst, HoldsTurn: t.HoldsTurn,
			Crashes: t.Crashes, Suspect: t.Suspect,
			Ties: record.Ties{
				Group: keys.GroupScope(t.Queue, t.Tenant, t.LimitKey, t.Group), Limit: keys.LimitScope(t.Queue, t.LimitKey),
				Parent: t.IsParent, Child: len(t.After) > 0,
			},
		},
		GroupKey: t.Group, LimitKey: t.LimitKey, Kind: t.Kind, Error: t.LastError, Headers: t.Headers,
		OnDead: t.OnDead, OnMissing: t.OnMissing, History: t.History, Notes: t.Notes, Payload: t.Payload,
	}
	for _, id := range t.After {
		rec.Parents = append(rec.Parents, id)
	}
	if u := t.Unique; u != nil {
		if len(u.Hash) != record.UniqueLen || bytes.Count(u.Hash, []byte{0}) == record.UniqueLen {
			return rec, fmt.Errorf("the hash %x of an idempotency key", u.Hash)
		}
		copy(rec.Unique[:], u.Hash)
		rec.UniqueKey, rec.UniqueFor, rec.MaxWait, rec.Flags = u.Key, u.For, u.MaxWait, u.Flags
	}
	return rec, t.check(&rec)
}

// check returns an error if no queue stores such a task.
func (t *Template) check(rec *record.Record) error {
	if err := checkQueue(t.Queue); err != nil {
		return err
	}
	for _, name := range []string{t.Tenant, t.Group, t.LimitKey, t.Kind, rec.UniqueKey} {
		if len(name) > maxName {
			return fmt.Errorf("a name of %d bytes", len(name))
		}
	}
	switch {
	case t.Priority > keys.MaxPriority:
		return fmt.Errorf("priority %d", t.Priority)
	case t.OnDead > keys.RunOnDead || t.OnMissing > keys.RefuseOnMissing:
		return fmt.Errorf("OnDead %d, OnMissing %d", t.OnDead, t.OnMissing)
	case t.Attempts > 0 && t.Attempts-1 > t.Leases: // that of a lease in force may count already
		return fmt.Errorf("%d attempts in %d leases", t.Attempts, t.Leases)
	case t.Retention < -1:
		return fmt.Errorf("a retention of %d ms", t.Retention)
	}
	return rec.Sound()
}

func checkQueue(name string) error {
	if name == "" || len(name) > maxName {
		return fmt.Errorf("a queue with a name of %d bytes", len(name))
	}
	return nil
}

// placed sets the place of a task, and the fields that belong to it.
func (t *taskLine) placed(id keys.ID, p keys.Place, rec *record.Record, ended *keys.EndedValue) {
	t.ID, t.State = lineID(id), lineState(p.Range)
	switch p.Range {
	case keys.Task:
		if p.At != keys.SinceOf(id) {
			t.Since = p.At
		}
	case keys.Scheduled:
		t.Due = p.At
	case keys.Blocked:
		t.ForGroup = p.At != 0 && p.At == rec.Group
		t.ForSuspects = keys.IsSuspectScope(p.At)
		t.ForLimit = p.At != 0 && !t.ForGroup && !t.ForSuspects
	default:
		t.EndedAt, t.Result = ended.At, ended.Result
		if p.At != keys.Forever {
			t.Until = p.At
		}
	}
}

// place returns the place of a task with a new ID, in a queue and a lane with these numbers.
func (t *taskLine) place(id keys.ID, queue, lane uint32, rec *record.Record) (keys.Place, error) {
	p := keys.Place{Range: byte(t.State), Group: queue}
	switch t.State {
	case keys.Task:
		p.Group, p.At = lane, cmp.Or(t.Since, keys.SinceOf(id))
		if t.Since != 0 && keys.IsFirstPlace(t.Since) {
			return p, fmt.Errorf("it has been ready since %#x, which is not the time of its ID", t.Since)
		}
	case keys.Scheduled:
		p.Group, p.At = 0, t.Due
	case keys.Blocked:
		switch {
		case t.ForGroup:
			p.At = rec.Group
		case t.ForLimit:
			p.At = rec.Limit
		case t.ForSuspects && t.Suspect:
			p.At = keys.SuspectScope(t.Queue, keys.SuspectPartOf(id, rec.Leases))
		}
		scopes := 0
		for _, waits := range []bool{t.ForGroup, t.ForLimit, t.ForSuspects} {
			if waits {
				scopes++
			}
		}
		if scopes > 1 || scopes == 1 && p.At == 0 {
			return p, errors.New("it waits in a scope that it does not have")
		}
	case keys.Dead, keys.Done, keys.Canceled:
		p.At = cmp.Or(t.Until, keys.Forever)
	default:
		return p, errors.New("it has no state")
	}
	return p, t.checkPlace(p)
}

// checkPlace refuses fields of a task in another state.
func (t *taskLine) checkPlace(p keys.Place) error {
	ended := keys.Ended(p.Range)
	for _, f := range []struct {
		name        string
		set, belong bool
	}{
		{"Since", t.Since != 0, p.Range == keys.Task},
		{"Lease", t.Lease != nil, p.Range == keys.Task},
		{"Due", t.Due != 0, p.Range == keys.Scheduled},
		{"ForGroup, ForLimit or ForSuspects", t.ForGroup || t.ForLimit || t.ForSuspects, p.Range == keys.Blocked},
		{"Pending", t.Pending != 0, p.Range == keys.Blocked && p.At == 0},
		{"EndedAt", t.EndedAt != 0, ended},
		{"Until", t.Until != 0, ended},
		{"Result", len(t.Result) > 0, ended},
		{"Pinned", t.Pinned != nil, p.Range == keys.Done && p.At == keys.Forever},
		{"HasKey", t.HasKey, t.Unique != nil && (!ended || t.KeyTill != 0)},
		{"KeyTill", t.KeyTill != 0, t.HasKey},
		{"HasTurn", t.HasTurn, t.Group != "" && (!ended || t.HoldsTurn)},
	} {
		if f.set && !f.belong {
			return fmt.Errorf("it is %s and has %s", states[t.State], f.name)
		}
	}
	return nil
}

// value returns the value at the place of a task.
func (t *taskLine) value(p keys.Place, lane uint32, rec *record.Record) []byte {
	return store.JoinValue(p, lane, rec, keys.EndedValue{At: t.EndedAt, Result: t.Result})
}

// leaseOf returns the portable form of a lease.
func leaseOf(h *keys.LeaseHeader, e *keys.LeaseEntry) *leaseLine {
	return &leaseLine{
		Token: e.Token, Deadline: h.Deadline, Duration: e.Duration, Leases: e.Leases, Attempts: e.Attempts,
		Worker: e.Worker, Local: h.Local,
	}
}

// entry returns the entry of a lease record.
func (l *leaseLine) entry(id keys.ID, p keys.Place) keys.LeaseEntry {
	return keys.LeaseEntry{
		ID: id, Lane: p.Group, Since: p.At, Token: l.Token, Leases: l.Leases, Attempts: l.Attempts,
		Duration: l.Duration, Worker: l.Worker,
	}
}

// templateOf returns the portable form of a task to produce.
func templateOf(queue, tenant string, priority uint8, encoded []byte) (Template, error) {
	rec, err := record.Decode(encoded)
	return Template{Queue: queue, Tenant: tenant, Priority: priority, Record: recordOf(&rec)}, err
}

// scheduleOf returns the portable form of a schedule.
func scheduleOf(name string, v *keys.ScheduleValue) (*scheduleLine, error) {
	t, err := templateOf(v.Queue, v.Tenant, v.Priority, v.Record)
	return &scheduleLine{
		Name: name, Start: v.Start, Passed: v.After, Last: v.Last, Missed: v.Missed, Paused: v.Paused,
		Every: v.Every, Jitter: v.Jitter, Cron: v.Cron, TimeZone: v.TimeZone, Template: t,
	}, err
}

// value returns the stored form of a schedule.
func (s *scheduleLine) value(rec *record.Record) []byte {
	return (&keys.ScheduleValue{
		Start: s.Start, After: s.Passed, Last: s.Last, Missed: s.Missed, Paused: s.Paused,
		Every: s.Every, Jitter: s.Jitter, Cron: s.Cron, TimeZone: s.TimeZone,
		Priority: s.Priority, Queue: s.Queue, Tenant: s.Tenant, Record: rec.Encode(),
	}).Append(nil)
}

// messageOf returns the portable form of a message.
func messageOf(m *keys.Message) (*messageLine, error) {
	l := &messageLine{
		Kind: m.Kind, Parent: lineID(m.Parent), Child: lineID(m.Child), Outcome: m.Outcome, Until: m.Until,
		Schedule: m.Schedule, Tick: m.Tick,
	}
	for _, id := range m.Siblings {
		l.Siblings = append(l.Siblings, lineID(id))
	}
	for i := range m.Tasks {
		t, err := templateOf(m.Tasks[i].Queue, m.Tasks[i].Tenant, m.Tasks[i].Priority, m.Tasks[i].Record)
		if err != nil {
			return nil, err
		}
		l.Tasks = append(l.Tasks, t)
	}
	if !m.HasTasks() || m.Kind == keys.MsgFlow {
		return l, nil
	}
	t, err := templateOf(m.Queue, m.Tenant, m.Priority, m.Record)
	l.Task = &t
	return l, err
}

// view is a task as it is read from a store.
type view struct {
	id    keys.ID
	place keys.Place
	lane  *store.Lane
	rec   record.Record
	ended keys.EndedValue
}

// beside returns what lies beside the record of the task besides its steps.
func (l *taskLine) beside() (b uint8) {
	if len(l.Signals) > 0 {
		b |= record.HasSignals
	}
	if len(l.Cursors) > 0 {
		b |= record.HasCursors
	}
	if l.Awaits {
		b |= record.Awaits
	}
	return b
}

// checkSignals returns an error if no task in a range has such signals.
func (l *taskLine) checkSignals(in byte) error {
	switch {
	case keys.Ended(in) && l.beside()&^record.HasCursors != 0:
		return errors.New("it has ended, and has signals")
	case l.Awaits && len(l.Steps) == 0:
		return errors.New("it waits for the signal of a step that it does not have")
	case len(l.Signals) > 0:
		return l.Signals.Sound()
	}
	return nil
}
