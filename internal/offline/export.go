package offline

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/record"
	"codeq/internal/store"
)

// Progress is called by an export or an import with its present work, and for how many of how many
// tasks this is done; 0 of 0: not known.
type Progress func(what string, done, total uint64)

// tellEvery is after how many lines Progress is told, and ctx is looked at.
const tellEvery = 1024

// ErrNode is matched by the error of Export for the directory of a node of a cluster.
var ErrNode = errors.New("it is the directory of a node of a cluster, which may lack what the others have")

const cacheBytes = 64 << 20

// Export writes the contents of a closed queue to out. copied: its directory may be a copy, with
// files of different moments.
func Export(ctx context.Context, fsys vfs.FS, dir string, copied bool, out io.Writer, p Progress) (_ Counts, err error) {
	d, err := manifest.OpenReadOnly(fsys, dir)
	if err != nil {
		return Counts{}, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if d.Node != "" {
		return Counts{}, fmt.Errorf("%w: node %q", ErrNode, d.Node)
	}
	if !copied {
		if err := d.RefuseCopy(); err != nil {
			return Counts{}, fmt.Errorf("open %s for reading: %w", dir, err)
		}
	}
	caches := store.NewCaches(cacheBytes, 0, d.Shards)
	defer caches.Close()
	e := &exporter{
		ctx: ctx, out: newWriter(out), progress: p, taken: make([]map[uint32]uint64, d.Shards), options: d.Options,
		crashed: d.Crashed || d.Open != nil,
	}
	defer func() {
		for _, s := range e.shards {
			err = errors.Join(err, s.st.Close())
		}
	}()
	for i := range d.Shards {
		if err := e.open(d, i, caches); err != nil {
			return Counts{}, fmt.Errorf("shard %d: %w", i, err)
		}
	}
	if err := e.all(); err != nil {
		return Counts{}, err
	}
	return e.out.end.Counts, nil
}

// exporter writes the lines of a directory.
type exporter struct {
	ctx      context.Context
	out      *writer
	progress Progress
	shards   []*exported
	header   headerLine
	options  *manifest.Options // nil: none are stored
	crashed  bool
	taken    []map[uint32]uint64 // by receiver and sender, the number of the last message that was taken
	done     uint64              // tasks
	lines    uint64
}

// exported is the knowledge of a shard while its tasks are read.
type exported struct {
	number  int
	st      *store.Store
	db      *pebble.DB
	lanes   *store.Snapshot
	leases  map[keys.ID]*leaseLine
	holders map[keys.ID]heldKey // of idempotency keys
	turns   map[keys.ID]bool    // tasks that have the turns of their groups
	pending map[keys.ID]uint64
	pinned  map[keys.ID]keys.PinnedValue
	clock   uint64    // of periods, as far as it is stored
	shift   uint64    // added to the deadlines of periods in the export
	came    []keyLine // keys that came from another directory, of tasks that are gone
}

// heldKey is an idempotency key that a task has.
type heldKey struct {
	hash  [keys.UniqueLen]byte
	until uint64
}

// The uses of a range of keys.
const (
	lined   = 1 + iota // it has lines, or is a part of those of tasks
	derived            // it follows from others
	dropped            // it is of a cluster, or of this directory
)

// ranges has the use of each of them.
var ranges = map[byte]int{
	keys.Meta: dropped, keys.Queue: lined, keys.Lane: lined, keys.Counters: lined, keys.Buckets: derived, keys.Settings: lined,
	keys.Inbound: derived, keys.Schedule: lined, keys.Sent: derived, keys.Applied: dropped, keys.Session: dropped,
	keys.Interest: dropped, keys.LeaseTime: dropped, keys.Daily: lined, keys.Placement: dropped, keys.Task: lined,
	keys.Lease: lined, keys.Scheduled: lined, keys.Blocked: lined, keys.Dead: lined, keys.Done: lined, keys.Canceled: lined,
	keys.Index: derived, keys.Unique: lined, keys.Freed: derived, keys.Group: lined, keys.Wake: lined, keys.Pending: lined,
	keys.Dependent: lined, keys.Outbound: lined, keys.Telling: lined, keys.Pin: lined, keys.Pinned: lined,
	keys.PeriodTime: lined, keys.Granted: lined, keys.ClockSets: dropped, keys.Step: lined, keys.DeadKind: derived,
}

// open opens the store of a shard.
func (e *exporter) open(d *manifest.Directory, i int, caches *store.Caches) error {
	st, err := openStore(d, i, caches)
	if err != nil {
		return err
	}
	s := &exported{number: i, st: st, db: st.DB(), lanes: store.NewSnapshot(st.DB())}
	e.shards = append(e.shards, s)
	return st.Read(s.knowsAll)
}

// knowsAll makes sure that the store has no range that this version does not know.
func (s *exported) knowsAll() error {
	it, err := s.db.NewIter(nil)
	if err != nil {
		return store.Error(err)
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	for valid := it.First(); valid; {
		prefix := it.Key()[0]
		if ranges[prefix] == 0 {
			return fmt.Errorf("%w: a key begins with %#x", base.ErrCorrupt, prefix)
		}
		if prefix == 0xff {
			break
		}
		valid = it.SeekGE([]byte{prefix + 1})
	}
	return store.Error(it.Error())
}

func (e *exporter) all() error {
	e.tell("reading the catalogue")
	e.header = headerLine{
		Codeq: magic, Version: lineVersion, Shards: len(e.shards), Time: uint64(time.Now().UnixMilli()), Crashed: e.crashed,
	}
	settings, totals, granted := make(map[string]keys.SettingsValue), make(totalsOf), make(map[string][]uint64)
	if err := e.each(func(s *exported) error {
		return errors.Join(e.inbound(s), e.counters(s, totals), s.periodClock(), s.days(totals))
	}); err != nil {
		return err
	}
	e.alignPeriods()
	if err := e.each(func(s *exported) error { return errors.Join(e.settings(s, settings), s.grants(granted)) }); err != nil {
		return err
	}
	if err := e.out.write(&Line{Header: &e.header}); err != nil {
		return err
	}
	if e.options != nil {
		if err := e.out.write(&Line{Options: (*optionsLine)(e.options)}); err != nil {
			return err
		}
	}
	for _, queue := range slices.Sorted(maps.Keys(settings)) {
		v := settings[queue]
		if v.IsNone() { // a message says that they were removed
			continue
		}
		l := &settingsLine{Queue: queue, Version: v.Version, Value: v.JSON}
		if at := granted[queue]; len(at) == len(e.shards) { // each shard knows
			l.Granted = new(slices.Max(at))
		}
		if err := e.out.write(&Line{Settings: l}); err != nil {
			return err
		}
	}
	if err := e.each(e.schedules); err != nil {
		return err
	}
	if err := totals.write(e.out); err != nil {
		return err
	}
	carried := make(map[string]int) // keys from another directory, by how many shards have them
	if err := e.each(func(s *exported) error { return e.tasks(s, carried) }); err != nil {
		return err
	}
	if err := e.each(e.ties); err != nil {
		return err
	}
	return e.out.finish()
}

// each calls f with each shard.
func (e *exporter) each(f func(*exported) error) error {
	for _, s := range e.shards {
		if err := s.st.Read(func() error { return f(s) }); err != nil {
			return fmt.Errorf("shard %d: %w", s.number, err)
		}
	}
	return nil
}

func (e *exporter) tell(what string) {
	if e.progress != nil {
		e.progress(what, e.done, max(e.done, e.header.Tasks))
	}
}

// write writes a line, and now and then tells that.
func (e *exporter) write(l *Line) error {
	if e.lines++; e.lines%tellEvery == 0 {
		if e.ctx.Err() != nil {
			return base.EndOf(e.ctx)
		}
		e.tell("writing tasks")
	}
	return e.out.write(l)
}

func corrupt(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
}

// inbound reads which messages a shard has taken.
func (e *exporter) inbound(s *exported) error {
	taken := make(map[uint32]uint64)
	e.taken[s.number] = taken
	return store.ScanParsed(s.db, keys.Inbound, keys.ParseNumbered, keys.ParseNumber, func(from uint32, n uint64) error {
		taken[from] = n
		return nil
	})
}

// counters reads the clock, how many tasks there are, and the latest totals.
func (e *exporter) counters(s *exported, totals totalsOf) error {
	return store.ScanParsed(s.db, keys.Counters, keys.ParseNumbered, keys.ParseCounters, func(n uint32, v keys.CountersValue) error {
		e.header.Clock, s.clock = max(e.header.Clock, v.Clock), max(s.clock, keys.ClockMillis(v.Clock))
		c := v.Counts
		e.header.Tasks += c.Ready + c.Scheduled + c.Blocked + c.Leased + c.Dead + c.Done + c.Canceled
		if v.Totals.Day == 0 {
			return nil
		}
		name, err := s.queue(n)
		if err == nil {
			totals.add(name, s.number, &v.Totals)
		}
		return err
	})
}

// periodClock reads the clock of periods, unless that of IDs stands for it.
func (s *exported) periodClock() error {
	err := store.Scan(s.db, keys.ClockSets, func(_, value []byte) error {
		sets, err := keys.ParseClockSets(value)
		s.clock = max(s.clock, store.ClockSets(sets).Latest())
		return corrupt(err)
	})
	if err != nil {
		return err
	}
	return store.Scan(s.db, keys.PeriodTime, func(_, value []byte) error {
		v, err := keys.ParsePeriodTime(value)
		s.clock = v.Clock
		return corrupt(err)
	})
}

// alignPeriods makes all shards continue with one clock of periods. Usually it is the wall clock.
// If that is behind the clock of a shard, which was at work when the wall clock was ahead, periods
// of the other shards must not end by this clock: their deadlines become later by the difference.
func (e *exporter) alignPeriods() {
	for _, s := range e.shards {
		e.header.Periods = max(e.header.Periods, s.clock)
	}
	for _, s := range e.shards {
		if now := max(s.clock, e.header.Time); now < e.header.Periods {
			s.shift = e.header.Periods - now
		}
	}
}

// later returns the deadline of a period as it is in the export; 0: there is none.
func (s *exported) later(deadline uint64) uint64 {
	if deadline == 0 {
		return 0
	}
	return keys.Later(deadline, s.shift)
}

// queue returns the name of a queue.
func (s *exported) queue(n uint32) (string, error) {
	name, err := store.Lookup(s.db, keys.AppendNumbered(nil, keys.Queue, n))
	if err == nil && name == nil {
		err = fmt.Errorf("%w: queue %d has no name", base.ErrCorrupt, n)
	}
	return string(name), err
}

// days reads the totals of earlier days.
func (s *exported) days(totals totalsOf) error {
	return store.Scan(s.db, keys.Daily, func(key, value []byte) error {
		if len(key) == 1 { // the day of the last sweep
			return nil
		}
		queue, _, err := keys.ParseTotalsKey(key)
		v, valueErr := keys.ParseTotals(value)
		if err := errors.Join(err, valueErr); err != nil {
			return corrupt(err)
		}
		totals.add(string(queue), s.number, &v)
		return nil
	})
}

// totalsOf has the totals of queues in each shard, by day; of two of one day the later ones, which
// count more.
type totalsOf map[string]map[uint32]map[int]*keys.TotalsValue

func (t totalsOf) add(queue string, shard int, v *keys.TotalsValue) {
	if t[queue] == nil {
		t[queue] = make(map[uint32]map[int]*keys.TotalsValue)
	}
	if t[queue][v.Day] == nil {
		t[queue][v.Day] = make(map[int]*keys.TotalsValue)
	}
	if last := t[queue][v.Day][shard]; last == nil || v.All.AtLeast(&last.All) {
		t[queue][v.Day][shard] = v
	}
}

// write writes, for each queue and day, the sum over all shards.
func (t totalsOf) write(out *writer) error {
	for _, queue := range slices.Sorted(maps.Keys(t)) {
		latest := make(map[int]keys.Totals) // up to the day, by shard
		for _, day := range slices.Sorted(maps.Keys(t[queue])) {
			var all, ofDay keys.Totals
			for shard, v := range t[queue][day] {
				latest[shard] = v.All
				ofDay.Add(&v.OfDay)
			}
			for _, v := range latest {
				all.Add(&v)
			}
			kinds := keys.EventKinds
			if all[keys.Unhandled] != 0 {
				kinds++
			}
			if err := out.write(&Line{Totals: &totalsLine{Queue: queue, Day: day, All: all[:kinds], OfDay: ofDay[:kinds]}}); err != nil {
				return err
			}
		}
	}
	return nil
}

// settings reads the settings that a shard has, and those that it sends to others.
func (e *exporter) settings(s *exported, latest map[string]keys.SettingsValue) error {
	add := func(queue string, value []byte) error {
		v, err := keys.ParseSettings(value)
		if err != nil {
			return fmt.Errorf("%w: settings of queue %q: %w", base.ErrCorrupt, queue, err)
		}
		if v.Version > latest[queue].Version {
			v.JSON = bytes.Clone(v.JSON)
			latest[queue] = v
		}
		return nil
	}
	if err := store.Scan(s.db, keys.Settings, func(key, value []byte) error {
		if len(key) == 1 { // settings that were removed are none in the new directory
			return nil
		}
		return add(string(key[1:]), value)
	}); err != nil {
		return err
	}
	return e.messages(s, func(m *keys.Message) error {
		if m.Kind != keys.MsgSettings {
			return nil
		}
		return add(m.Queue, m.Settings)
	})
}

// grants reads when the last tasks of queues with rates were leased in a shard.
func (s *exported) grants(granted map[string][]uint64) error {
	return store.Scan(s.db, keys.Granted, func(key, value []byte) error {
		at, err := keys.ParseNumber(value)
		queue := string(key[1:])
		granted[queue] = append(granted[queue], s.later(at))
		return corrupt(err)
	})
}

// messages visits the messages of a shard that were not taken.
func (e *exporter) messages(s *exported, visit func(*keys.Message) error) error {
	return store.Scan(s.db, keys.Outbound, func(key, value []byte) error {
		to, seq, err := keys.ParseOutbound(key)
		m, valueErr := keys.ParseMessage(value)
		if err := errors.Join(err, valueErr); err != nil || int(to) >= len(e.shards) {
			return fmt.Errorf("%w: message %x: %w", base.ErrCorrupt, key, err)
		}
		if seq <= e.taken[to][uint32(s.number)] {
			return nil
		}
		return visit(&m)
	})
}

// schedules writes the schedules of a shard.
func (e *exporter) schedules(s *exported) error {
	return store.Scan(s.db, keys.Schedule, func(key, value []byte) error {
		name, err := keys.ParseSchedule(key)
		v, valueErr := keys.ParseScheduleValue(value)
		if err := errors.Join(err, valueErr); err != nil {
			return corrupt(err)
		}
		l, err := scheduleOf(name, &v)
		if err != nil {
			return fmt.Errorf("%w: schedule %q: %w", base.ErrCorrupt, name, err)
		}
		return e.out.write(&Line{Schedule: l})
	})
}

// tasks writes the tasks of a shard, and then the keys of tasks that are gone.
func (e *exporter) tasks(s *exported, carried map[string]int) error {
	if err := s.load(); err != nil {
		return err
	}
	line := Line{Task: new(taskLine)}
	for _, prefix := range [...]byte{keys.Done, keys.Dead, keys.Canceled, keys.Task, keys.Scheduled, keys.Blocked} {
		if err := store.Scan(s.db, prefix, func(key, value []byte) error {
			v, err := s.view(key, value)
			if err != nil {
				return err
			}
			if err := s.fill(line.Task, v); err != nil {
				return err
			}
			e.done++
			return e.write(&line)
		}); err != nil {
			return err
		}
	}
	var gone []keyLine
	for _, h := range s.holders { // the others' tasks were written
		if h.until != 0 {
			gone = append(gone, keyLine{h.hash[:], s.later(h.until)})
		}
	}
	for _, k := range s.came { // in all shards, unless it was freed, or taken, in its own one
		id := fmt.Sprint(k.Hash, k.Until)
		if carried[id]++; carried[id] == len(e.shards) {
			gone = append(gone, keyLine{k.Hash, s.later(k.Until)})
		}
	}
	slices.SortFunc(gone, func(a, b keyLine) int { return cmp.Or(cmp.Compare(a.Until, b.Until), bytes.Compare(a.Hash, b.Hash)) })
	for i := range gone {
		if err := e.write(&Line{Key: &gone[i]}); err != nil {
			return err
		}
	}
	*s = exported{number: s.number, st: s.st, db: s.db, lanes: s.lanes, shift: s.shift} // memory is for the next shard
	return nil
}

// load reads the entries of tasks beside their records.
func (s *exported) load() error {
	s.leases, s.holders, s.turns = make(map[keys.ID]*leaseLine), make(map[keys.ID]heldKey), make(map[keys.ID]bool)
	s.pending, s.pinned = make(map[keys.ID]uint64), make(map[keys.ID]keys.PinnedValue)
	if err := store.ScanLeases(s.db, func(_ uint64, h keys.LeaseHeader, entries []keys.LeaseEntry) error {
		for i := range entries { // the last of several of one task is the newest
			entry := &entries[i]
			if old := s.leases[entry.ID]; old == nil || old.Leases <= entry.Leases {
				s.leases[entry.ID] = leaseOf(&h, entry)
			}
		}
		return nil
	}); err != nil {
		return err
	}
	return errors.Join(
		store.ScanParsed(s.db, keys.Unique, keys.ParseHashed, keys.ParseUnique, func(hash [keys.UniqueLen]byte, v keys.UniqueValue) error {
			if v.ID == keys.Gone {
				s.came = append(s.came, keyLine{hash[:], v.Until})
			} else {
				s.holders[v.ID] = heldKey{hash, v.Until}
			}
			return nil
		}),
		store.ScanParsed(s.db, keys.Group, keys.ParseScope, keys.ParseGroup, func(_ uint64, v keys.GroupValue) error {
			s.turns[v.Holder] = true
			return nil
		}),
		store.ScanParsed(s.db, keys.Pending, keys.ParseByID, keys.ParseNumber, func(id keys.ID, n uint64) error {
			s.pending[id] = n
			return nil
		}),
		store.ScanParsed(s.db, keys.Pinned, keys.ParseByID, keys.ParsePinned, func(id keys.ID, v keys.PinnedValue) error {
			s.pinned[id] = v
			return nil
		}),
	)
}

// view decodes a task. It shares memory with value.
func (s *exported) view(key, value []byte) (v view, err error) {
	if v.id, v.place, err = keys.ParsePlaceKey(key); err != nil {
		return v, corrupt(err)
	}
	number, rec, ended, err := store.SplitValue(v.place, value)
	if err == nil {
		v.ended = ended
		v.rec, err = record.Decode(rec)
	}
	if err != nil {
		return v, fmt.Errorf("%w: task %s: %w", base.ErrCorrupt, keys.FormatID(v.id), err)
	}
	v.lane, err = s.lanes.Lane(number)
	return v, err
}

// fill sets the line of a task.
func (s *exported) fill(t *taskLine, v view) (err error) {
	*t = taskLine{Template: Template{Queue: v.lane.Queue, Tenant: v.lane.Tenant, Priority: v.lane.Priority, Record: recordOf(&v.rec)}}
	t.placed(v.id, v.place, &v.rec, &v.ended)
	if l := s.leases[v.id]; l != nil && v.place.Range == keys.Task && l.Leases == v.rec.Leases+1 {
		t.Lease = l
	}
	if h, ok := s.holders[v.id]; ok && h.hash == v.rec.Unique && (h.until != 0 || !keys.Ended(v.place.Range)) {
		t.HasKey, t.KeyTill = true, s.later(h.until)
		delete(s.holders, v.id)
	}
	if t.Steps = v.rec.Kept; v.rec.Steps > 0 || t.Lease != nil {
		if t.Steps, err = store.StepsOf(s.db, v.id); err != nil {
			return err
		}
	}
	if v.rec.Beside&record.HasSignals != 0 || t.Lease != nil {
		if t.Signals, err = store.SignalsOf(s.db, v.id); err != nil {
			return err
		}
	}
	if t.Cursors = v.rec.Cursors; v.rec.Beside&record.HasCursors != 0 || t.Lease != nil {
		if t.Cursors, err = store.CursorsOf(s.db, v.id); err != nil {
			return err
		}
	}
	t.Awaits = v.rec.Beside&record.Awaits != 0
	t.HasTurn = s.turns[v.id]
	if v.place.Range == keys.Blocked && v.place.At == 0 {
		t.Pending = s.pending[v.id]
	}
	if p, ok := s.pinned[v.id]; ok {
		t.Pinned = &pinnedLine{p.Count, s.later(p.Until)}
	}
	if t.Until = s.later(t.Until); t.Due != v.rec.RunAt { // it waits between attempts
		t.Due = s.later(t.Due)
	}
	return nil
}

// ties writes what tasks of a shard have to do with others.
func (e *exporter) ties(s *exported) error {
	return errors.Join(
		store.Scan(s.db, keys.Dependent, func(key, value []byte) error {
			parent, child, err := keys.ParseDependent(key)
			if err != nil || len(value) != 1 {
				return fmt.Errorf("%w: dependent %x has value %x: %w", base.ErrCorrupt, key, value, err)
			}
			return e.write(&Line{Dependent: &dependentLine{lineID(parent), lineID(child), value[0]}})
		}),
		store.Scan(s.db, keys.Pin, func(key, _ []byte) error {
			child, parent, err := keys.ParsePin(key)
			if err != nil {
				return corrupt(err)
			}
			return e.write(&Line{Pin: &pinLine{lineID(child), lineID(parent)}})
		}),
		store.Scan(s.db, keys.Telling, func(key, value []byte) error {
			id, end, err := keys.ParseTelling(key, value)
			if err != nil {
				return corrupt(err)
			}
			return e.write(&Line{Telling: &tellingLine{lineID(id), lineState(end)}})
		}),
		store.Scan(s.db, keys.Wake, func(key, value []byte) error {
			n, scope, id, err := keys.ParseGrouped(key)
			if err != nil || len(value) != 1 {
				return fmt.Errorf("%w: wakeup %x has value %x: %w", base.ErrCorrupt, key, value, err)
			}
			queue, err := s.queue(n)
			if err != nil {
				return err
			}
			return e.write(&Line{Wake: &wakeLine{Queue: queue, Scope: scope, ID: lineID(id), Cancel: value[0] == keys.WakeCancel}})
		}),
		e.messages(s, func(m *keys.Message) error {
			if m.Kind == keys.MsgSettings {
				return nil
			}
			l, err := messageOf(m)
			if err != nil {
				return corrupt(err)
			}
			l.Until = s.later(l.Until)
			return e.write(&Line{Message: l})
		}),
	)
}
