package codeq

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/fsck"
	"codeq/internal/keys"
	"codeq/internal/offline"
	"codeq/internal/store"
)

// peek is a view of what a shard's disk has now, without asking the owner.
func (q *Queue) peek(s *shard) *view {
	r := q.replicas[s.index]
	r.mu.RLock()
	return newView(r, s.Store.DB().NewSnapshot())
}

// check lets the checker walk the shard's disk.
func (v *view) check(index, shards int) error {
	return fsck.Check(v.snap, offline.Rules, index, shards)
}

// checkAll lets the checker walk every shard's disk.
func (q *Queue) checkAll() error {
	var errs []error
	for i, s := range q.led() {
		v := q.peek(s)
		errs = append(errs, v.check(i, len(q.replicas)))
		v.close()
	}
	return errors.Join(errs...)
}

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
	s.settleAfterCommit(op)
}

func (op *probeOp) verb() *verb { return &internal }

// probe calls look on the owner goroutine of a shard.
func (s *shard) probe(look func(*shard) error) error {
	op := &probeOp{completion: newCompletion(0), look: look}
	_, err := s.do(context.Background(), op, &op.completion, nil)
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
				leased[name] += int(qs.Counts.Leased) + qs.Orphans
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
	if !s.Probe().IsAtRest() || len(s.undecided.deferred) > 0 || s.claims.MayServe() || s.due() {
		return errBusy
	}
	v := q.peek(s)
	defer v.close()
	claimable, err := s.Check(v.snap, s.claims.Needs)
	if err != nil {
		return err
	}
	return s.claims.Check(claimable)
}

// stored returns how many entries a range has in all shards.
func stored(t *testing.T, q *Queue, prefix byte) (n int) {
	t.Helper()
	for _, s := range q.led() {
		require.NoError(t, store.Scan(s.Store.DB(), prefix, func([]byte, []byte) error { n++; return nil }))
	}
	return n
}

// flush writes what each shard has in memory into tables.
func flush(t *testing.T, q *Queue) {
	t.Helper()
	for _, s := range q.led() {
		require.NoError(t, s.probe(func(s *shard) error { return s.Store.Flush(context.Background()) }))
	}
}

// watched reports whether events of a queue are collected for anybody.
func watched(q *Queue) bool { return q.events.Wanted() != 0 }

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

// longestUpkeep is the longest step of any shard's owner since the queue was opened, of
// kinds other than the given ones. A test asks for 10 ms only in its full form, on a machine
// of its own.
func longestUpkeep(t testing.TB, q *Queue, except ...UpkeepKind) UpkeepStats {
	return mostOf(t, q, func(s *UpkeepStats) int64 { return int64(s.Max) }, except)
}

func mostOf(t testing.TB, q *Queue, measure func(*UpkeepStats) int64, except []UpkeepKind) (most UpkeepStats) {
	t.Helper()
	st, err := q.StorageStats()
	require.NoError(t, err)
	for _, shard := range st.Shards {
		for _, s := range shard.Upkeep {
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

// addAll adds all tasks that disk has.
func (v *view) addAll(tasks map[ID]*TaskInfo) error {
	for _, prefix := range keys.RecordRanges {
		if err := store.Scan(v.snap, prefix, func(key, value []byte) error {
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
