package codeq

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/fsck"
	"codeq/internal/keys"
	"codeq/internal/schema"
)

var seedFlag = flag.Uint64("seed", 0, "what tests draw their chances from that print a seed; 0: another one each time")

// longFlag asks for the sizes and counts that take too long for every run; -short, for those of the run
// with the race detector.
var longFlag = flag.Bool("long", false, "large sizes and many rounds, where TESTING.md says so")

// sized is the first of three sizes with -short, the last with -long, and else the one between.
func sized(short, usual, long int) int {
	switch {
	case testing.Short():
		return short
	case *longFlag:
		return long
	}
	return usual
}

func drawSeed() uint64 {
	if *seedFlag != 0 {
		return *seedFlag
	}
	return rand.Uint64()
}

// seeded is the chance of a test, whose seed is told when the test fails.
func seeded(t *testing.T) *rand.Rand {
	seed := drawSeed()
	t.Logf("-seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// peek is a view of what a shard's disk has now, without asking the owner.
func (q *Queue) peek(s *shard) *view {
	r := q.replicas[s.index]
	r.mu.RLock()
	return newView(r, s.Store.DB().NewSnapshot())
}

// check has the checker walk the shard's disk.
func (v *view) check(index, shards int) error { return fsck.Check(v.snap, storedRules, index, shards) }

// recordRanges are the ranges in which the records of tasks lie.
var recordRanges = [...]byte{keys.Task, keys.Scheduled, keys.Blocked, keys.Dead, keys.Done, keys.Canceled}

// checkAll has the checker walk every shard's disk.
func (q *Queue) checkAll() error {
	var errs []error
	for i, s := range q.led() {
		v := q.peek(s)
		errs = append(errs, v.check(i, len(q.replicas)))
		v.close()
	}
	return errors.Join(errs...)
}

// beyond31Bits is 2^31, which is negative where an int has 32 bits.
var beyond31Bits = func(n int64) int { return int(n) }(1 << 31)

// startingAt returns q as seen by a caller for whom chance picks the given
// shard: Produce and ProduceBatch store there, Claim and ClaimBatch ask there
// first. For other verbs, use q.
func (q *Queue) startingAt(shard int) *Queue {
	return &Queue{opts: q.opts, replicas: q.replicas[shard : shard+1]}
}

// probeOp looks at a shard's memory from its owner goroutine.
type probeOp struct {
	completion
	look func(*shard) error
}

func (op *probeOp) resolve(s *shard) {
	op.err = op.look(s)
	s.settle(op)
}

func (op *probeOp) verb() *verb { return &internal }

// probe calls look on the owner goroutine of a shard.
func (s *shard) probe(look func(*shard) error) error {
	op := &probeOp{completion: newCompletion(), look: look}
	_, err := s.do(context.Background(), op, &op.completion)
	return err
}

// errBusy is returned by checkMemory while the group under way has changes.
var errBusy = errors.New("the group is not empty")

// checkMemory compares the memory of every shard with its disk. REQUIRES: no
// operation is under way, except claims that wait.
func (q *Queue) checkMemory() error {
	for i, s := range q.led() {
		err := errBusy
		for tries := 0; errors.Is(err, errBusy) && tries < 1000; tries++ {
			err = s.probe(func(s *shard) error { return s.checkMemory(q) })
		}
		if err != nil {
			return fmt.Errorf("memory of shard %d: %w", i, err)
		}
	}
	return q.checkGates()
}

// checkGates makes sure that the gate of every queue counts the leases of all
// shards, and that all shards go by the same settings.
func (q *Queue) checkGates() error {
	leased := make(map[string]int)
	first := make(map[string]engine.Configured) // as the first shard knows them
	for i, s := range q.led() {
		if err := s.probe(func(s *shard) error {
			n := 0
			for name, qs := range s.Queues {
				leased[name] += int(qs.Counts.Leased)
				if qs.Version == 0 {
					continue
				}
				if n++; i == 0 {
					first[name] = qs.Configured
				}
				if want := first[name]; qs.Version != want.Version || !bytes.Equal(qs.Value, want.Value) {
					return fmt.Errorf("shard %d has settings %x of queue %q, the first one has %x", i, qs.Value, name, want.Value)
				}
			}
			if n != len(first) {
				return fmt.Errorf("shard %d has the settings of %d queues, the first one of %d", i, n, len(first))
			}
			return nil
		}); err != nil {
			return err
		}
	}
	return q.led()[0].claims.CheckLimits(leased, first)
}

// checkMemory returns what in the shard's memory is not as its disk says it
// should be. The owner goroutine calls it.
func (s *shard) checkMemory(q *Queue) error {
	if !s.IsAtRest() || len(s.undecided.deferred) > 0 || s.claims.AreHungry() || s.due() {
		return errBusy
	}
	v := q.peek(s)
	defer v.close()
	claimable, err := s.Check(v.snap, func(q *engine.Queue) bool { return s.claims.Needs(q) || s.permits.needs(q) })
	if err != nil {
		return err
	}
	return s.claims.Check(claimable)
}

// setGate makes the claims of a queue pass a gateway; nil: none.
func (s *shard) setGate(queue string, g dispatch.Gateway) {
	s.claims.SetGateway(s.claims.Of(s.QueueNamed(queue)), g)
}

// list returns all tasks that the disk has, without asking the owners.
func (q *Queue) list() (map[ID]*TaskInfo, error) {
	found := make(map[ID]*TaskInfo)
	var errs []error
	for _, s := range q.led() {
		v := q.peek(s)
		errs = append(errs, v.addAll(found))
		v.close()
	}
	return found, errors.Join(errs...)
}

// longestStep is the longest step of any shard's owner since the queue was opened, of
// kinds other than the given ones. A test asks for 10 ms only in its full form, on a machine
// of its own.
func longestStep(t testing.TB, q *Queue, except ...StepKind) StepStats {
	return mostOf(t, q, func(s *StepStats) int64 { return int64(s.Max) }, except)
}

func mostOf(t testing.TB, q *Queue, measure func(*StepStats) int64, except []StepKind) (most StepStats) {
	t.Helper()
	st, err := q.StorageStats()
	require.NoError(t, err)
	for _, shard := range st.Shards {
		for _, s := range shard.Steps {
			if measure(&s) > measure(&most) && !slices.Contains(except, s.Kind) {
				most = s
			}
		}
	}
	return most
}

// countingCommitter counts what is committed. The owner alone writes it.
type countingCommitter struct {
	committer
	commits int
	keys    uint32
	largest uint32 // keys in one commit
}

func (c *countingCommitter) Commit(b *pebble.Batch) error {
	c.commits++
	c.keys += b.Count()
	c.largest = max(c.largest, b.Count())
	return c.committer.Commit(b)
}

// hookFS is a file system that asks before it changes anything: an error from
// before is that of the operation, which then is not done, or half done if it
// is a write.
type hookFS struct {
	vfs.FS
	before func(op, name string) error
	wrote  func(f vfs.File) // may be nil; after a write
}

func (fs *hookFS) file(op, name string, open func() (vfs.File, error)) (vfs.File, error) {
	if err := fs.before(op, name); err != nil {
		return nil, err
	}
	f, err := open()
	if err != nil {
		return nil, err
	}
	return &hookFile{f, fs, name}, nil
}

func (fs *hookFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return fs.file("create", name, func() (vfs.File, error) { return fs.FS.Create(name, c) })
}

func (fs *hookFS) ReuseForWrite(oldname, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return fs.file("reuse", name, func() (vfs.File, error) { return fs.FS.ReuseForWrite(oldname, name, c) })
}

func (fs *hookFS) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	return fs.file("open", name, func() (vfs.File, error) { return fs.FS.OpenReadWrite(name, c, opts...) })
}

func (fs *hookFS) OpenDir(name string) (vfs.File, error) {
	return fs.file("open directory", name, func() (vfs.File, error) { return fs.FS.OpenDir(name) })
}

func (fs *hookFS) Rename(oldname, newname string) error {
	if err := fs.before("rename", newname); err != nil {
		return err
	}
	return fs.FS.Rename(oldname, newname)
}

func (fs *hookFS) Remove(name string) error {
	if err := fs.before("remove", name); err != nil {
		return err
	}
	return fs.FS.Remove(name)
}

func (fs *hookFS) Unwrap() vfs.FS { return fs.FS }

type hookFile struct {
	vfs.File
	fs   *hookFS
	name string
}

func (f *hookFile) Write(p []byte) (int, error) {
	if err := f.fs.before("write", f.name); err != nil {
		n, _ := f.File.Write(p[:len(p)/2])
		return n, err
	}
	n, err := f.File.Write(p)
	if f.fs.wrote != nil {
		f.fs.wrote(f.File)
	}
	return n, err
}

func (f *hookFile) Sync() error {
	if err := f.fs.before("sync", f.name); err != nil {
		return err
	}
	return f.File.Sync()
}

func (f *hookFile) SyncData() error {
	if err := f.fs.before("sync", f.name); err != nil {
		return err
	}
	return f.File.SyncData()
}

func (f *hookFile) SyncTo(length int64) (bool, error) {
	if err := f.fs.before("sync", f.name); err != nil {
		return false, err
	}
	return f.File.SyncTo(length)
}

func (f *hookFile) Close() error {
	return errors.Join(f.fs.before("close", f.name), f.File.Close())
}

// addAll adds all tasks that disk has.
func (v *view) addAll(tasks map[ID]*TaskInfo) error {
	for _, prefix := range recordRanges {
		if err := schema.Scan(v.snap, prefix, func(key, value []byte) error {
			id, p, err := keys.ParsePlaceKey(key)
			if err != nil {
				return err
			}
			t, err := v.Task(id, p, value)
			if err == nil {
				tasks[id] = taskInfo(t)
			}
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}
