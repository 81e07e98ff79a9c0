package engine

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/convert"
	"codeq/internal/crashfs"
	"codeq/internal/fsck"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/record"
	"codeq/internal/recurrence"
	"codeq/internal/store"
)

// driver drives the States of a queue without an owner: groups, upkeep, messages, crashes. Stories
// and the model use it.
type driver struct {
	t       require.TestingT
	shared  *store.Caches
	seed    byte
	config  Config
	killed  bool          // the process before has died when shards are loaded
	slow    time.Duration // step of the clock of budgets at each reading
	passed  time.Duration
	shards  []*drivenShard
	wanted  KindSet
	tenants countedTenants // nil: shards do not know each other's tenants
	Instant

	clockAge  func(shard int) uint64           // State.ClockAge when a shard is loaded
	forGood   func() bool                      // the taken messages are durable; nil: always
	sealing   func(*drivenShard)               // before a group is sealed
	sealed    func(*drivenShard)               // before the write, which may release the batch
	persisted func(*drivenShard)               // Effects has the reports of the group
	kept      func(*drivenShard, []upkeepDone) // the steps of upkeep in a group
	forgotten func(*Queue)                     // for a queue that leaves memory
}

// drivenShard is one shard. A group is under way from the first operation after a commit.
type drivenShard struct {
	*State
	under bool
	mail  []*delivery // under way to other shards
}

// delivery are messages under way.
type delivery struct {
	Outgoing
	taken     int
	persisted bool // the receiver has committed all of them
}

func (d *driver) elapsed() time.Duration {
	d.passed += d.slow
	return d.passed
}

// open opens new shards, in the number of the configuration.
func (d *driver) open() {
	d.config.Seed, d.config.Elapsed = [32]byte{d.seed}, d.elapsed
	for range d.config.Shards {
		config := store.Config{FS: crashfs.New(), Log: slog.New(slog.DiscardHandler), MemTableBytes: 256 << 10, ReclaimFrom: -1, Still: true}
		st, err := store.Open("store", config, d.shared, true)
		require.NoError(d.t, err)
		d.shards = append(d.shards, &drivenShard{State: &State{round: round{Reads: store.Reads{Store: st}}}})
	}
	d.load()
}

// load makes States of the stored data. It returns the schedules that rest.
func (d *driver) load() (resting []*recurrence.Schedule) {
	stores := make([]*store.Store, len(d.shards))
	for i, s := range d.shards {
		stores[i] = s.Store
	}
	var said bytes.Buffer
	require.NoError(d.t, convert.Reconcile(stores, true, slog.New(slog.NewTextHandler(&said, nil))))
	require.Empty(d.t, said.String(), "nothing was lost")
	for i, s := range d.shards {
		c := d.config
		c.Shard, c.Seed[1] = i, byte(i)
		state := new(State)
		state.Init(c, s.Store)
		state.Update(Start{Instant: d.Instant, Format: manifest.Format, Room: s.Room})
		*s = drivenShard{State: state}
		require.NoError(d.t, s.Load(d.clockAge(i)))
		if d.tenants != nil {
			s.Share(d.tenants, nil)
		}
		resting = append(resting, s.Effects.Resting...)
		s.Effects.Resting, s.Effects.Configured, s.Effects.Shown = nil, nil, nil
	}
	if d.killed && !d.config.Replicated {
		var crashes []*crash
		suspects := 0
		for _, s := range d.shards {
			crashes = append(crashes, s.Suspects.AtWork())
			suspects += crashes[len(crashes)-1].Suspects
		}
		for _, c := range crashes {
			c.Suspects = suspects
		}
	}
	return resting
}

func (d *driver) close() {
	for _, s := range d.shards {
		s.State.Close()
		_ = s.Group.Batch.Close()
		require.NoError(d.t, s.Store.Close())
	}
	d.shards = nil
}

// crash loads the committed data. The monotonic clock begins anew.
func (d *driver) crash() (resting []*recurrence.Schedule) {
	for _, s := range d.shards {
		s.State.Close()
		s.Share(nil, nil)
		require.NoError(d.t, s.Group.Batch.Close())
	}
	d.Now, d.Uptime = 0, 0
	return d.load()
}

// begin begins a group of a shard, if none is under way. Otherwise it gives the next operation a
// new budget.
func (d *driver) begin(s *drivenShard) {
	if !s.under {
		s.under = true
		at := d.Instant
		at.Reap = d.Now
		s.Begin(Start{Instant: at, Format: s.Format, Room: s.Room, Tight: s.Tight, Wanted: d.wanted | s.Mail.Interested})
		s.Judge(d.Now)
		if s.Names.ready.WantsRefill() {
			s.Refill()
		}
	}
	s.BeginBudget(CallerBudget, d.passed)
}

// commit persists the group.
func (d *driver) commit(s *drivenShard) {
	d.sealing(s)
	s.Seal()
	require.NoError(d.t, s.Broken)
	if d.sealed != nil {
		d.sealed(s)
	}
	if !s.Group.Batch.Empty() {
		require.NoError(d.t, s.Store.Commit(s.Group.Batch))
	}
	e := &s.Effects
	for i := range e.Outgoing {
		s.mail = append(s.mail, &delivery{Outgoing: e.Outgoing[i]})
	}
	d.persisted(s)
	for _, q := range e.Fed {
		q.Fed = false
	}
	e.Fed, e.Shown, e.Freed, e.Configured, e.Outgoing = nil, nil, nil, nil, nil
	e.Suspects = suspectEffects{}
	e.Clear()
	s.Group.Clear()
	s.Tidy()
	for _, q := range s.Names.Queues {
		q.Shared = d.tenants.hasNames(q.Name)
	}
	for _, q := range e.Forgotten {
		d.forgotten(q)
		s.Names.Forget(q)
	}
	e.Forgotten = nil
	s.under = false
	for _, from := range d.shards {
		for _, p := range from.mail {
			p.persisted = p.persisted || d.shards[p.To] == s && p.taken == len(p.Messages)
		}
	}
}

// keepUp does the due work of a shard, in as many groups as necessary.
func (d *driver) keepUp(s *drivenShard) (groups int) {
	for !s.under && (s.isDueAt(d.Instant) || s.Names.ready.WantsRefill()) {
		groups++
		require.Less(d.t, groups, 1000, "upkeep does not end")
		d.begin(s)
		steps := s.KeepUp(d.passed, 0)
		require.NoError(d.t, s.Broken)
		d.kept(s, steps)
		d.commit(s)
	}
	return groups
}

func (s *drivenShard) isDueAt(at Instant) bool {
	at.Reap = at.Now
	s.Update(Start{Instant: at, Format: s.Format, Room: s.Room, Tight: s.Tight, Wanted: s.Wanted})
	return s.upkeepIsDue()
}

// take makes a shard take the messages under way to it. took gets their number and their sender.
func (d *driver) take(s *drivenShard, took func(n int, p *delivery, from int)) {
	for from, sender := range d.shards {
		for _, p := range sender.mail {
			if d.shards[p.To] != s || p.taken == len(p.Messages) {
				continue
			}
			d.begin(s)
			n := s.TakeMessages(from, p.First+uint64(p.taken), p.Messages[p.taken:])
			p.taken += n
			took(n, p, from)
		}
	}
}

// confirm makes a shard go on with its next messages, and forget the messages that the others have
// stored durably.
func (d *driver) confirm(s *drivenShard) {
	s.mail = slices.DeleteFunc(s.mail, func(p *delivery) bool {
		if p.persisted {
			d.begin(s)
			s.Mail.Confirmed(p.To, p.First, len(p.Messages))
			if d.forGood == nil || d.forGood() {
				s.Mail.Durable(p.To, p.First+uint64(len(p.Messages))-1)
			}
		}
		return p.persisted
	})
}

// lose loses the messages under way from a shard, or the answers to them.
func (d *driver) lose(s *drivenShard) {
	for _, p := range s.mail {
		s.Mail.Confirmed(p.To, p.First, 0)
	}
	s.mail = nil
}

// rules check the stored values that users see.
var rules = &fsck.Rules{
	Settings: func(value []byte) (uint64, error) {
		set, err := ParseSettings(value)
		return set.Version, err
	},
	Schedule: recurrence.CheckStored,
}

// check makes sure that the disk of a shard contradicts neither itself nor the shard's memory, if
// nothing is under way.
func (d *driver) check(s *drivenShard) error {
	if s.under || !s.isAtRest() {
		return nil
	}
	claimable, err := s.Check(s.Store.DB(), func(*Queue) bool { return false })
	err = errors.Join(err, d.tenants.check(d.shards), fsck.Check(s.Store.DB(), rules, s.config.Shard, s.config.Shards))
	if err != nil {
		return err
	}
	for _, q := range s.Names.Queues {
		if _, ok := s.Names.First(q); !ok && claimable(q) {
			return errors.New("queue " + q.Name + " shows no task, and has one to be claimed")
		}
	}
	return nil
}

// tie writes the ties of a new task into its record, from the names in it.
func tie(k *LaneKey, rec *record.Record) {
	rec.Limit = keys.LimitScope(k.Queue, rec.LimitKey)
	rec.Group = keys.GroupScope(k.Queue, k.Tenant, rec.LimitKey, rec.GroupKey)
	if rec.UniqueKey != "" {
		rec.Unique = keys.UniqueHash(k.Queue, k.Tenant, rec.LimitKey, rec.GroupKey, rec.UniqueKey)
		rec.Flags |= record.KeyFlags(rec.Flags)
	}
}

// markTwins notes which tasks of a batch have the key of an earlier one.
func markTwins(tasks []NewTask) {
	for i := range tasks {
		for n := range i {
			if u := tasks[i].Tied; u != nil && u.Unique != [keys.UniqueLen]byte{} && tasks[n].Tied != nil && tasks[n].Tied.Unique == u.Unique {
				u.Twin = n
				break
			}
		}
	}
}

// countedTenants is a tenantTable: the shards of a driver are in one goroutine.
type countedTenants map[countedTenant]*tenantTurns

type countedTenant struct {
	queue string
	laneName
}

// tenantTurns is the count of a tenant.
type tenantTurns struct {
	atomic.Int32
	users int
}

func (t countedTenants) Hold(q *Queue, tenant string, priority uint8) *atomic.Int32 {
	of := countedTenant{q.Name, laneName{tenant, priority}}
	if t[of] == nil {
		t[of] = new(tenantTurns)
	}
	t[of].users++
	return &t[of].Int32
}

func (t countedTenants) Drop(q *Queue, tenant string, priority uint8) {
	of := countedTenant{q.Name, laneName{tenant, priority}}
	if t[of].users--; t[of].users == 0 {
		delete(t, of)
	}
}

func (t countedTenants) hasNames(queue string) bool {
	for of := range t {
		if of.queue == queue && of.tenant != "" {
			return true
		}
	}
	return false
}

// check compares the counts with the rings of the shards.
func (t countedTenants) check(shards []*drivenShard) error {
	turns, users := make(map[countedTenant]int32), make(map[countedTenant]int)
	for _, s := range shards {
		for _, l := range s.Names.lanes.All() {
			if l == nil {
				continue
			}
			if u := s.Names.ready.Usage(&l.tasks); u.Share {
				of := countedTenant{l.Queue, laneName{l.Tenant, l.Priority}}
				if users[of]++; u.Turn {
					turns[of]++
				}
			}
		}
	}
	for of, c := range t {
		if c.Load() != turns[of] || c.users != users[of] {
			return fmt.Errorf("%+v is counted in %d shards, of %d that know it; it is in %d, of %d", of, c.Load(), c.users, turns[of], users[of])
		}
	}
	if len(users) != len(t) {
		return fmt.Errorf("%d tenants are counted, shards have %d", len(t), len(users))
	}
	return nil
}
