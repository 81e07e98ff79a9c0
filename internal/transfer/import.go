package transfer

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/fsck"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/reading"
	"codeq/internal/record"
	"codeq/internal/store"
	"codeq/internal/ticks"
)

// Config says how an export is imported.
type Config struct {
	Shards int // of the new directory; 0: as many as the export had
	// Named is called with the old and the new ID of each task; may be nil.
	Named    func(old, id keys.ID) error
	Progress Progress
}

// Result describes an import.
type Result struct {
	Counts
	Shards int
}

// ErrZone is matched by the error for a schedule with a time zone that this machine does not know.
var ErrZone = errors.New("time zone is not known here")

// Check reads an export to its end, and checks each line as Import does. Contradictions between
// lines are found by Import only.
func Check(ctx context.Context, in io.Reader, o Config) (Result, error) {
	im, err := newImporter(ctx, in, o)
	if err == nil {
		err = im.readAll()
	}
	if err != nil {
		return Result{}, err
	}
	return Result{im.in.seen, len(im.shards)}, nil
}

// Import makes the directory of a queue of an export, and verifies it. path does not exist, or is
// empty; if Import fails, it may hold anything. Import uses other files beside it, with names that
// begin with that of path, and removes them.
func Import(ctx context.Context, fsys vfs.FS, path string, in io.Reader, o Config) (_ Result, err error) {
	im, err := newImporter(ctx, in, o)
	if err != nil {
		return Result{}, err
	}
	if err := im.make(fsys, path); err != nil {
		return Result{}, err
	}
	im.tell("verifying")
	report, err := fsck.Verify(fsys, path, reading.Rules, false, false)
	if err != nil {
		return Result{}, err
	}
	for _, p := range report.Problems {
		return Result{}, fmt.Errorf("%w: its lines contradict each other, in shard %d: %s (and %d other contradictions)",
			ErrFile, p.Shard, p.Text, len(report.Problems)-1)
	}
	return Result{im.in.seen, len(im.shards)}, nil
}

// importer writes the contents of lines into a plain store for each shard. The store of the shard
// is then derived from it.
type importer struct {
	ctx    context.Context
	in     *reader
	o      Config
	shards []*imported
	fs     vfs.FS // nil: nothing is written
	path   string

	header  *Header
	options *manifest.Options // of the application; nil: it has stored none

	ids       map[keys.ID]keys.ID // the new IDs of tasks, by those that they had
	taken     map[keys.ID]bool    // the new IDs
	mentioned map[keys.ID]bool    // by ties
	held      map[[keys.UniqueLen]byte]bool
	scopes    map[scopeIn]bool // with tasks that wait in them
	late      *spool           // lines that name tasks which have not come yet
	part      int              // of the lines that have been read, the last one
	all       bool             // all lines have been read
	done      uint64           // tasks
	written   int              // bytes since the room on the disk was looked at
}

// imported is a shard of the new queue.
type imported struct {
	number int
	raw    *store.Scratch // nil: nothing is written
	batch  *pebble.Batch
	queues map[string]uint32
	lanes  map[laneKey]uint32
	leases []storedLease
	sent   uint64 // the number of the last message, to itself
}

// scopeIn is a scope in a shard.
type scopeIn struct {
	scope uint64
	shard int
}

type laneKey struct {
	queue, tenant string
	priority      uint8
}

type storedLease struct {
	header keys.LeaseHeader
	entry  keys.LeaseEntry
}

func newImporter(ctx context.Context, in io.Reader, o Config) (*importer, error) {
	im := &importer{
		ctx: ctx, in: newReader(in), o: o, ids: make(map[keys.ID]keys.ID), taken: make(map[keys.ID]bool),
		mentioned: make(map[keys.ID]bool), held: make(map[[keys.UniqueLen]byte]bool), scopes: make(map[scopeIn]bool),
	}
	var err error
	if im.header, err = im.in.header(); err != nil {
		return nil, err
	}
	shards := cmp.Or(o.Shards, im.header.Shards)
	if shards < 1 || shards > manifest.MaxShards {
		return nil, fmt.Errorf("%d shards: 1 to %d are possible", shards, manifest.MaxShards)
	}
	for i := range shards {
		im.shards = append(im.shards, &imported{
			number: i, queues: make(map[string]uint32), lanes: make(map[laneKey]uint32),
		})
	}
	return im, nil
}

func (im *importer) tell(what string) {
	if im.o.Progress != nil {
		im.o.Progress(what, im.done, max(im.done, im.header.Tasks))
	}
}

// The memory that the stores of all shards share, and that of each at the least.
const (
	memTables   = 64 << 20
	minMemTable = 1 << 20
)

func rawSuffix(shard int) string { return fmt.Sprintf(".raw-%03d", shard) }

const lateSuffix = ".late"

// make makes the directory.
func (im *importer) make(fsys vfs.FS, path string) (err error) {
	im.fs, im.path = fsys, path
	if err := manifest.MakeDirectory(fsys, path); err != nil {
		return err
	}
	d := manifest.New(fsys, path, manifest.Manifest{Format: manifest.Format, Shards: len(im.shards), ID: manifest.NewID()})
	if err := d.Lock(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	defer func() {
		for _, s := range im.shards {
			err = errors.Join(err, im.drop(s))
		}
		err = errors.Join(err, im.late.remove())
	}()
	for _, s := range im.shards {
		raw := path + rawSuffix(s.number)
		if err := fsys.RemoveAll(raw); err != nil {
			return err
		}
		if s.raw, err = store.NewScratch(fsys, raw, uint64(max(minMemTable, memTables/len(im.shards)))); err != nil {
			return err
		}
		s.batch = s.raw.DB().NewBatch()
	}
	if im.late, err = newSpool(fsys, path+lateSuffix); err != nil {
		return err
	}
	if err := im.readAll(); err != nil {
		return err
	}
	im.ids, im.taken = nil, nil // others need the memory
	d.Options, d.Crashed, d.Tool = im.options, im.header.Crashed, true
	if err := fsck.Derive(d, reading.Rules, im.derive); err != nil {
		return err
	}
	return manifest.SyncDirectory(fsys, path)
}

// derive gives the store of a shard to fsck.Derive, and removes that of the shard before.
func (im *importer) derive(shard int) (*pebble.DB, error) {
	if im.ctx.Err() != nil {
		return nil, base.EndOf(im.ctx)
	}
	im.tell(fmt.Sprintf("writing shard %d of %d", shard+1, len(im.shards)))
	if shard > 0 {
		if err := im.drop(im.shards[shard-1]); err != nil {
			return nil, err
		}
	}
	if err := im.room(); err != nil {
		return nil, err
	}
	return im.shards[shard].raw.DB(), nil
}

// drop closes and removes the store of a shard, unless that was done.
func (im *importer) drop(s *imported) error {
	if s.raw == nil {
		return nil
	}
	err := errors.Join(s.batch.Close(), s.raw.Close(), im.fs.RemoveAll(im.path+rawSuffix(s.number)))
	s.raw = nil
	return err
}

const (
	batchBytes = 256 << 10
	lookBytes  = 32 << 20 // are written before the room on the disk is looked at again
	// KeepFree is how many bytes an import leaves free on its disk.
	KeepFree = 64 << 20
)

// set writes a key of a shard.
func (im *importer) set(s *imported, key, value []byte) error {
	if s.raw == nil {
		return nil
	}
	if err := s.batch.Set(key, value, nil); err != nil || s.batch.Len() < batchBytes {
		return err
	}
	return im.flush(s)
}

func (im *importer) flush(s *imported) error {
	if s.raw == nil || s.batch.Empty() {
		return nil
	}
	im.written += s.batch.Len()
	if im.written > lookBytes {
		if err := im.room(); err != nil {
			return err
		}
	}
	err := errors.Join(s.batch.Commit(pebble.NoSync), s.batch.Close())
	s.batch = s.raw.DB().NewBatch()
	return err
}

// room makes sure that there is room on the disk, since a store would wait for it without end.
func (im *importer) room() error {
	im.written = 0
	if usage, err := im.fs.GetDiskUsage(im.path); err == nil && usage.AvailBytes < KeepFree {
		return fmt.Errorf("%w: %d bytes are free, %d are to stay", base.ErrDiskFull, usage.AvailBytes, KeepFree)
	}
	return nil
}

// readAll reads all lines.
func (im *importer) readAll() error {
	im.tell("reading")
	var l Line
	for n := 1; ; n++ {
		if n%tellEvery == 0 {
			if im.ctx.Err() != nil {
				return base.EndOf(im.ctx)
			}
			im.tell("reading")
		}
		text, done, err := im.in.next(&l)
		if err != nil {
			return err
		}
		if done {
			break
		}
		waits, err := im.take(&l)
		if err != nil {
			return im.failed(err)
		}
		if waits {
			if err := im.late.add(text); err != nil {
				return err
			}
		}
	}
	im.all = true
	if err := im.late.each(func(text []byte) error {
		if err := parse(text, &l); err != nil {
			return err
		}
		_, err := im.take(&l)
		return err
	}); err != nil {
		return im.failed(err)
	}
	for _, s := range im.shards {
		if err := errors.Join(im.finish(s), im.flush(s)); err != nil {
			return err
		}
	}
	return nil
}

// wrongLine is a fault of a line.
type wrongLine struct{ error }

func wrong(format string, args ...any) error { return wrongLine{fmt.Errorf(format, args...)} }

// failed says which line has an error, if it is one of a line.
func (im *importer) failed(err error) error {
	switch w := (wrongLine{}); {
	case !errors.As(err, &w):
		return err
	case im.all: // one that was put off
		return fmt.Errorf("%w: %w", ErrFile, err)
	}
	return im.in.wrong(err)
}

// take takes in a line. waits: it names tasks that have not come yet, and must be taken again in
// the end.
func (im *importer) take(l *Line) (waits bool, err error) {
	if part := l.part(); part < im.part && !im.all {
		return false, wrong("its order is not that of export")
	} else if !im.all {
		im.part = part
	}
	switch {
	case l.Options != nil:
		im.options = (*manifest.Options)(l.Options)
		if field, value, limit := im.options.SetDefaults(math.MaxInt, math.MaxInt); limit != "" {
			return false, wrong("%s of the options is %v (allowed: %s)", field, value, limit)
		}
	case l.Settings != nil:
		return false, im.settings(l.Settings)
	case l.Schedule != nil:
		return im.schedule(l.Schedule)
	case l.Totals != nil:
		return false, im.totals(l.Totals)
	case l.Key != nil:
		return false, im.key(l.Key)
	case l.Task != nil:
		return im.task(l.Task)
	case l.Dependent != nil:
		return false, im.dependent(l.Dependent)
	case l.Pin != nil:
		return false, im.pin(l.Pin)
	case l.Telling != nil:
		return false, im.telling(l.Telling)
	case l.Wake != nil:
		return false, im.wake(l.Wake)
	case l.Message != nil:
		return im.message(l.Message)
	default:
		return false, wrong("it is of no kind that may be there")
	}
	return false, nil
}

// queue returns the number of a queue in a shard.
func (im *importer) queue(s *imported, name string) (uint32, error) {
	n := s.queues[name]
	if n != 0 {
		return n, nil
	}
	n = uint32(len(s.queues)) + 1
	s.queues[name] = n
	return n, im.set(s, keys.AppendNumbered(nil, keys.Queue, n), []byte(name))
}

// lane returns the numbers of a queue and a lane in a shard.
func (im *importer) lane(s *imported, t *Template) (queue, lane uint32, err error) {
	if queue, err = im.queue(s, t.Queue); err != nil {
		return 0, 0, err
	}
	k := laneKey{t.Queue, t.Tenant, t.Priority}
	if n, ok := s.lanes[k]; ok {
		return queue, n, nil
	}
	n := uint32(len(s.lanes))
	if n >= keys.MaxLane {
		return 0, 0, wrong("more than %d queues, tenants and priorities in a shard", keys.MaxLane)
	}
	s.lanes[k] = n
	entry := keys.LaneValue{Queue: queue, Priority: t.Priority, Tenant: t.Tenant, Seq: uint64(n) + 1}
	return queue, n, im.set(s, keys.AppendNumbered(nil, keys.Lane, n), entry.Append(nil))
}

// named returns the new ID of a task; one that is gone keeps its own, which no task has.
func (im *importer) named(id ID) keys.ID {
	if now, ok := im.ids[keys.ID(id)]; ok {
		return now
	}
	return keys.ID(id)
}

func (im *importer) shardOf(id keys.ID) *imported {
	return im.shards[keys.ShardOf(id, len(im.shards))]
}

// home returns the shard of a task that is new, or gets another ID in place of old.
func (im *importer) home(ties *record.Ties, old ID) *imported {
	if n, bound := ties.Home(len(im.shards)); bound {
		return im.shards[n]
	}
	return im.shardOf(keys.ID(old))
}

// rename gives a task a new ID in a shard and a lane. Only their parts of it change, so its time
// stays.
func (im *importer) rename(old keys.ID, s *imported, lane uint32) error {
	if old[6]>>4 != 7 {
		return wrong("task %s: it has no ID that a queue makes", ID(old))
	}
	if _, ok := im.ids[old]; ok {
		return wrong("task %s comes twice", ID(old))
	}
	id := old
	id[9], id[10], id[11] = byte(lane>>16), byte(lane>>8), byte(lane)
	for !keys.Route(&id, s.number, len(im.shards)) || im.taken[id] {
		random := binary.BigEndian.Uint32(id[12:]) + 1 // tasks of two shards may have the same one
		binary.BigEndian.PutUint32(id[12:], random)
	}
	im.ids[old], im.taken[id] = id, true
	if im.o.Named == nil {
		return nil
	}
	return im.o.Named(old, id)
}

// parents maps the parents of a task. Those that are gone are dropped, unless they are missing to
// the task, or a tie says that they have yet to end for it. It returns false if some have not come
// yet.
func (im *importer) parents(rec *record.Record, onMissing bool) bool {
	kept := rec.Parents[:0]
	for _, id := range rec.Parents {
		now, ok := im.ids[id]
		switch {
		case ok:
			kept = append(kept, now)
		case !im.all:
			return false
		case im.mentioned[id] || onMissing && rec.OnMissing != 0:
			kept = append(kept, id)
		}
	}
	if rec.Parents = kept; len(kept) == 0 {
		rec.Parents = nil
	}
	rec.Child = len(kept) > 0
	return true
}

// settings gives all shards the settings of a queue.
func (im *importer) settings(l *Settings) error {
	if err := checkQueue(l.Queue); err != nil {
		return wrongLine{err}
	}
	value := keys.SettingsValue{Version: l.Version, JSON: l.Value}.Append(nil)
	if _, err := reading.Rules.Settings(bytes.Clone(value)); err != nil {
		return wrong("settings of queue %q: %w", l.Queue, err)
	}
	for _, s := range im.shards {
		if err := im.set(s, append([]byte{keys.Settings}, l.Queue...), value); err != nil {
			return err
		}
	}
	return nil
}

// schedule stores a schedule. What depends on the machine is found when it is first read, before
// all tasks.
func (im *importer) schedule(l *Schedule) (waits bool, err error) {
	if !im.all {
		zone, err := ticks.Zone(l.TimeZone)
		if err != nil {
			return false, fmt.Errorf("schedule %q: %w: %q: %w", l.Name, ErrZone, l.TimeZone, err)
		}
		if l.Cron != "" {
			if _, err := ticks.ParseCron(l.Cron, zone); err != nil {
				return false, wrong("schedule %q: %w", l.Name, err)
			}
		}
	}
	rec, err := l.record()
	if err != nil {
		return false, wrong("schedule %q: %w", l.Name, err)
	}
	if !im.parents(&rec, true) {
		return true, nil
	}
	key, value := keys.AppendSchedule(nil, l.Name), l.value(&rec)
	if _, err := reading.Rules.Schedule(key, value); err != nil || l.Cron == "" && l.Every == 0 {
		return false, wrong("schedule %q, of Cron %q and Every %d: %w", l.Name, l.Cron, l.Every, err)
	}
	return false, im.set(im.shards[keys.ShardOfSchedule(l.Name, len(im.shards))], key, value)
}

// totals stores the totals of a queue in one shard: as rows of earlier days, and in the counters of
// the queue, which a later line of it replaces.
func (im *importer) totals(l *Totals) error {
	v := keys.TotalsValue{Day: l.Day}
	if err := checkQueue(l.Queue); err != nil {
		return wrongLine{err}
	}
	if l.Day == 0 || len(l.All) != len(v.All) || len(l.OfDay) != len(v.OfDay) {
		return wrong("totals of queue %q of %d and %d events on day %d", l.Queue, len(l.All), len(l.OfDay), l.Day)
	}
	copy(v.All[:], l.All)
	copy(v.OfDay[:], l.OfDay)
	if !v.All.AtLeast(&v.OfDay) {
		return wrong("totals of queue %q on day %d: less than on that day", l.Queue, l.Day)
	}
	s := im.shards[keys.ShardOfSchedule(l.Queue, len(im.shards))]
	n, err := im.queue(s, l.Queue)
	if err != nil {
		return err
	}
	counters := keys.CountersValue{Clock: im.header.Clock, Totals: v}
	return errors.Join(
		im.set(s, keys.AppendTotals(nil, l.Queue, l.Day), v.Append(nil)),
		im.set(s, keys.AppendNumbered(nil, keys.Counters, n), counters.Append(nil)))
}

// key gives all shards the key of a task that is gone: the hash does not tell its shard.
func (im *importer) key(l *Key) error {
	hash, err := im.hold(l.Hash)
	if err != nil {
		return err
	}
	if l.Until == 0 {
		return wrong("key %x is taken for no time", l.Hash)
	}
	value := keys.UniqueValue{ID: keys.Gone, Until: l.Until}.Append(nil)
	for _, s := range im.shards {
		if err := im.set(s, keys.AppendHashed(nil, hash), value); err != nil {
			return err
		}
	}
	return nil
}

// hold notes that an idempotency key is taken.
func (im *importer) hold(b []byte) (hash [keys.UniqueLen]byte, err error) {
	if len(b) != len(hash) {
		return hash, wrong("the hash of a key has %d bytes, and not %d", len(b), len(hash))
	}
	if copy(hash[:], b); im.held[hash] {
		return hash, wrong("key %x is taken twice", b)
	}
	im.held[hash] = true
	return hash, nil
}

// task stores a task.
func (im *importer) task(l *Task) (waits bool, err error) {
	rec, err := l.record()
	if err != nil {
		return false, wrong("task %s: %w", l.ID, err)
	}
	s := im.home(&rec.Ties, l.ID)
	queue, lane, err := im.lane(s, &l.Template)
	if err != nil {
		return false, err
	}
	if !im.all {
		if l.Lease != nil && l.Lease.Leases != l.Leases+1 {
			return false, wrong("task %s has lease %d after %d", l.ID, l.Lease.Leases, l.Leases)
		}
		if err := im.rename(keys.ID(l.ID), s, lane); err != nil {
			return false, err
		}
		im.done++
	}
	id := im.ids[keys.ID(l.ID)]
	p, err := l.place(id, queue, lane, &rec)
	if err != nil {
		return false, wrong("task %s: %w", l.ID, err)
	}
	if p.Range == keys.Blocked && p.At != 0 {
		im.scopes[scopeIn{p.At, s.number}] = true
	}
	if !im.parents(&rec, false) {
		return true, nil
	}
	if err := im.set(s, p.AppendKey(nil, id), l.value(p, lane, &rec)); err != nil {
		return false, err
	}
	return false, im.rest(s, l, id, p, &rec)
}

// rest stores the entries of a task beside its record.
func (im *importer) rest(s *imported, l *Task, id keys.ID, p keys.Place, rec *record.Record) error {
	if l.Lease != nil {
		h := keys.LeaseHeader{Local: l.Lease.Local, Deadline: l.Lease.Deadline}
		s.leases = append(s.leases, storedLease{h, l.Lease.entry(id, p)})
	}
	if l.HasKey {
		hash, err := im.hold(l.Unique.Hash)
		if err != nil {
			return err
		}
		if err := im.set(s, keys.AppendHashed(nil, hash), keys.UniqueValue{ID: id, Until: l.KeyTill}.Append(nil)); err != nil {
			return err
		}
	}
	if l.HasTurn {
		if err := im.set(s, keys.AppendScope(nil, rec.Group), keys.GroupValue{Holder: id}.Append(nil)); err != nil {
			return err
		}
	}
	if l.Pending != 0 {
		if err := im.set(s, keys.AppendByID(nil, keys.Pending, id), keys.AppendNumber(nil, l.Pending)); err != nil {
			return err
		}
	}
	if l.Pinned == nil {
		return nil
	}
	return im.set(s, keys.AppendByID(nil, keys.Pinned, id), keys.PinnedValue(*l.Pinned).Append(nil))
}

// dependent stores that a task waits for another one, in the shard of the latter.
func (im *importer) dependent(l *Dependent) error {
	if l.OnDead > keys.MaxOnDead {
		return wrong("task %s waits with OnDead %d", l.Child, l.OnDead)
	}
	parent := im.mention(l.Parent)
	return im.set(im.shardOf(parent), keys.AppendDependent(nil, parent, im.named(l.Child)), []byte{l.OnDead})
}

// mention notes that a tie names a task, and returns its new ID.
func (im *importer) mention(id ID) keys.ID {
	im.mentioned[keys.ID(id)] = true
	return im.named(id)
}

// pin stores that a result is kept for a task, in the shard of the latter.
func (im *importer) pin(l *Pin) error {
	child := im.named(l.Child)
	return im.set(im.shardOf(child), keys.AppendPin(nil, child, im.mention(l.Parent)), nil)
}

// telling stores that children are being told of the end of a task.
func (im *importer) telling(l *Telling) error {
	if !keys.Ended(byte(l.End)) {
		return wrong("children of task %s are told that it is %s", l.ID, states[l.End])
	}
	id := im.mention(l.ID)
	return im.set(im.shardOf(id), keys.AppendByID(nil, keys.Telling, id), []byte{byte(l.End)})
}

// wake stores a wakeup, in the shard of the tasks that it concerns. A scope without tasks that wait
// needs none.
func (im *importer) wake(l *Wake) error {
	if err := checkQueue(l.Queue); err != nil {
		return wrongLine{err}
	}
	how := byte(keys.WakeUp)
	if l.Cancel {
		how = keys.WakeCancel
	}
	if l.Scope == 0 {
		id := im.named(l.ID)
		return im.awaken(im.shardOf(id), l, id, how)
	}
	for _, s := range im.shards {
		if !im.scopes[scopeIn{l.Scope, s.number}] {
			continue
		}
		if err := im.awaken(s, l, keys.ID{}, how); err != nil {
			return err
		}
	}
	return nil
}

func (im *importer) awaken(s *imported, l *Wake, id keys.ID, how byte) error {
	n, err := im.queue(s, l.Queue)
	if err != nil {
		return err
	}
	return im.set(s, keys.AppendGrouped(nil, keys.Wake, n, l.Scope, id), []byte{how})
}

// message stores a message, which its receiver sends to itself. Those of two shards have no order.
func (im *importer) message(l *Message) (waits bool, err error) {
	m := keys.Message{Kind: l.Kind, Outcome: l.Outcome, Until: l.Until}
	about := l.Parent
	switch l.Kind {
	case keys.MsgAdmit, keys.MsgFollow:
		return im.admission(l, &m)
	case keys.MsgDepend, keys.MsgUnpin:
	case keys.MsgEnded, keys.MsgLeft:
		about = l.Child
	default:
		return false, wrong("a message of kind %d", l.Kind)
	}
	if l.Task != nil {
		return false, wrong("a message of kind %d with a task", l.Kind)
	}
	if l.Parent != (ID{}) {
		m.Parent = im.mention(l.Parent)
	}
	if l.Child != (ID{}) {
		m.Child = im.named(l.Child)
	}
	return false, im.send(im.shardOf(im.named(about)), &m)
}

// admission stores a message with a task to produce.
func (im *importer) admission(l *Message, m *keys.Message) (waits bool, err error) {
	if l.Task == nil {
		return false, wrong("a message of kind %d without a task", l.Kind)
	}
	rec, err := l.Task.record()
	if err != nil {
		return false, wrong("message: %w", err)
	}
	if !im.parents(&rec, true) {
		return true, nil
	}
	m.Queue, m.Tenant, m.Priority, m.Record = l.Task.Queue, l.Task.Tenant, l.Task.Priority, rec.Encode()
	if l.Kind == keys.MsgFollow {
		m.Parent = im.named(l.Parent)
	}
	return false, im.send(im.home(&rec.Ties, l.Parent), m)
}

func (im *importer) send(s *imported, m *keys.Message) error {
	s.sent++
	return im.set(s, keys.AppendOutbound(nil, uint32(s.number), s.sent), m.Append(nil))
}

// leasesAtOnce is how many leases are in one record.
const leasesAtOnce = 256

// finish stores the leases of a shard, and its clocks.
func (im *importer) finish(s *imported) error {
	slices.SortStableFunc(s.leases, func(a, b storedLease) int {
		return cmp.Or(cmp.Compare(a.header.Deadline, b.header.Deadline), cmp.Compare(b2i(a.header.Local), b2i(b.header.Local)),
			cmp.Compare(a.entry.Worker, b.entry.Worker))
	})
	clock := im.header.Clock
	for left := s.leases; len(left) > 0; {
		n := 1
		for n < min(len(left), leasesAtOnce) && left[n].header == left[0].header {
			n++
		}
		clock++
		value, worker := left[0].header.Append(nil), ""
		for _, l := range left[:n] {
			if l.entry.Worker != worker {
				worker = l.entry.Worker
				value = keys.AppendWorker(value, worker)
			}
			value = l.entry.Append(value, clock)
		}
		var key [keys.LeaseLen]byte
		keys.PutLease(key[:], clock)
		if err := im.set(s, key[:], value); err != nil {
			return err
		}
		left = left[n:]
	}
	if im.header.Periods != keys.ClockMillis(clock) { // which would stand for it
		v := keys.PeriodTimeValue{Clock: im.header.Periods}
		if err := im.set(s, []byte{keys.PeriodTime}, v.Append(nil)); err != nil {
			return err
		}
	}
	return im.set(s, keys.AppendNumbered(nil, keys.Counters, 0), (&keys.CountersValue{Clock: clock}).Append(nil))
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// spool is a file of lines that are read again. A nil spool has none, and keeps none.
type spool struct {
	fs   vfs.FS
	path string
	file vfs.File
	out  *bufio.Writer
}

func newSpool(fsys vfs.FS, path string) (*spool, error) {
	f, err := fsys.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return nil, err
	}
	return &spool{fsys, path, f, bufio.NewWriterSize(f, 1<<18)}, nil
}

func (s *spool) add(text []byte) error {
	if s == nil {
		return nil
	}
	_, err := s.out.Write(text)
	return err
}

// each visits the lines.
func (s *spool) each(visit func(text []byte) error) (err error) {
	if s == nil {
		return nil
	}
	if err := s.out.Flush(); err != nil {
		return err
	}
	f, err := s.fs.Open(s.path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for r := newReader(f); ; {
		text, err := r.read()
		if errors.Is(err, io.ErrUnexpectedEOF) && len(r.buf) == 0 {
			return nil
		}
		if err == nil {
			err = visit(text)
		}
		if err != nil {
			return err
		}
	}
}

func (s *spool) remove() error {
	if s == nil {
		return nil
	}
	return errors.Join(s.file.Close(), s.fs.Remove(s.path))
}
