package offline

import (
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
	"codeq/internal/platform"
	"codeq/internal/record"
	"codeq/internal/store"
)

// ImportConfig says how an export is imported.
type ImportConfig struct {
	Shards int // of the new directory; 0: as many as the export had
	// Named is called with the old and the new ID of each task; may be nil.
	Named    func(old, id keys.ID) error
	Progress Progress
}

// ImportResult describes an import.
type ImportResult struct {
	Counts
	Shards int
}

// ErrZone is matched by the error for a schedule with a time zone that this machine does not know.
var ErrZone = errors.New("time zone is not known here")

// ManifestName is the name of the file without which a directory holds no queue.
const ManifestName = manifest.Name

// IsOfVolume reports whether a name in a directory is of the volume that the directory is the root
// of, and stands for nothing.
func IsOfVolume(fsys vfs.FS, dir, name string) bool { return manifest.IsOfVolume(fsys, dir, name) }

// CheckExport reads an export to its end, and checks each line as Import does. Contradictions
// between lines are found by Import only.
func CheckExport(ctx context.Context, in io.Reader, o ImportConfig) (ImportResult, error) {
	im, err := newImporter(ctx, in, o)
	if err == nil {
		err = im.readAll()
	}
	if err != nil {
		return ImportResult{}, err
	}
	return ImportResult{im.in.seen, len(im.shards)}, nil
}

// Import makes the directory of a queue of an export, and verifies it. path does not exist, or is
// empty; if Import fails, it may hold anything. Import uses other files beside it, with names that
// begin with that of path, and removes them.
func Import(ctx context.Context, fsys vfs.FS, path string, in io.Reader, o ImportConfig) (_ ImportResult, err error) {
	im, err := newImporter(ctx, in, o)
	if err != nil {
		return ImportResult{}, err
	}
	if err := im.make(fsys, path); err != nil {
		return ImportResult{}, err
	}
	im.tell("verifying")
	report, err := fsck.Verify(fsys, path, Rules, false, false)
	if err != nil {
		return ImportResult{}, err
	}
	for _, p := range report.Problems {
		return ImportResult{}, fmt.Errorf("%w: its lines contradict each other, in shard %d: %s (and %d other contradictions)",
			ErrFile, p.Shard, p.Text, len(report.Problems)-1)
	}
	return ImportResult{im.in.seen, len(im.shards)}, nil
}

// importer writes the contents of lines into a plain store for each shard. The store of the shard
// is then derived from it.
type importer struct {
	ctx    context.Context
	in     *reader
	o      ImportConfig
	shards []*imported
	fs     vfs.FS // nil: nothing is written
	path   string

	header  *headerLine
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
	failure   error            // the first of a write; nothing is written after it
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

func newImporter(ctx context.Context, in io.Reader, o ImportConfig) (*importer, error) {
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
	if err := fsck.Derive(d, Rules, im.derive); err != nil {
		return err
	}
	return platform.SyncDirectory(fsys, path)
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

// set writes a key of a shard, unless a write has failed before; see failure.
func (im *importer) set(s *imported, key, value []byte) {
	if s.raw == nil || im.failure != nil {
		return
	}
	im.failure = s.batch.Set(key, value, nil)
	if s.batch.Len() >= batchBytes {
		im.flush(s)
	}
}

func (im *importer) flush(s *imported) {
	if s.raw == nil || im.failure != nil {
		return
	}
	if im.written += s.batch.Len(); im.written > lookBytes {
		if im.failure = im.room(); im.failure != nil {
			return
		}
	}
	im.failure = errors.Join(s.batch.Commit(pebble.NoSync), s.batch.Close())
	s.batch = s.raw.DB().NewBatch()
}

// room makes sure that there is room on the disk, since a store would wait for it without end.
func (im *importer) room() error {
	im.written = 0
	if usage, err := im.fs.GetDiskUsage(im.path); err == nil && usage.AvailBytes < KeepFree {
		return fmt.Errorf("%w: %d bytes are free, %d must stay free", base.ErrDiskFull, usage.AvailBytes, KeepFree)
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
		if err = cmp.Or(im.failure, err); err != nil {
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
		return cmp.Or(im.failure, err)
	}); err != nil {
		return im.failed(err)
	}
	for _, s := range im.shards {
		im.finish(s)
		im.flush(s)
	}
	return im.failure
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
		im.pin(l.Pin)
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
func (im *importer) queue(s *imported, name string) uint32 {
	n := s.queues[name]
	if n == 0 {
		n = uint32(len(s.queues)) + 1
		s.queues[name] = n
		im.set(s, keys.AppendNumbered(nil, keys.Queue, n), []byte(name))
	}
	return n
}

// lane returns the numbers of a queue and a lane in a shard.
func (im *importer) lane(s *imported, t *Template) (queue, lane uint32, err error) {
	queue = im.queue(s, t.Queue)
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
	im.set(s, keys.AppendNumbered(nil, keys.Lane, n), entry.Append(nil))
	return queue, n, nil
}

// named returns the new ID of a task; one that is gone keeps its own, which no task has.
func (im *importer) named(id lineID) keys.ID {
	if now, ok := im.ids[keys.ID(id)]; ok {
		return now
	}
	return keys.ID(id)
}

func (im *importer) shardOf(id keys.ID) *imported {
	return im.shards[keys.ShardOf(id, len(im.shards))]
}

// home returns the shard of a task that is new, or gets another ID in place of old.
func (im *importer) home(ties *record.Ties, old lineID) *imported {
	if n, bound := ties.Home(len(im.shards)); bound {
		return im.shards[n]
	}
	return im.shardOf(keys.ID(old))
}

// rename gives a task a new ID in a shard and a lane. Only their parts of it change, so its time
// stays.
func (im *importer) rename(old keys.ID, s *imported, lane uint32) error {
	if old[6]>>4 != 7 {
		return wrong("task %s: it has no ID that a queue makes", lineID(old))
	}
	if _, ok := im.ids[old]; ok {
		return wrong("task %s comes twice", lineID(old))
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
// yet. siblings: Nth refers to another task of the line.
func (im *importer) parents(rec *record.Record, onMissing, siblings bool) bool {
	kept := rec.Parents[:0]
	for _, id := range rec.Parents {
		now, ok := im.ids[id]
		_, sibling := keys.NthOf(id)
		switch {
		case sibling && siblings:
			kept = append(kept, id)
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

// finish stores the leases of a shard, and its clocks.
func (im *importer) finish(s *imported) {
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
		im.set(s, key[:], value)
		left = left[n:]
	}
	if im.header.Periods != keys.ClockMillis(clock) { // which would stand for it
		v := keys.PeriodTimeValue{Clock: im.header.Periods}
		im.set(s, []byte{keys.PeriodTime}, v.Append(nil))
	}
	im.set(s, keys.AppendNumbered(nil, keys.Counters, 0), (&keys.CountersValue{Clock: clock}).Append(nil))
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}
