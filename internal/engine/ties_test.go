package engine

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
	"codeq/internal/record"
)

// TestFingerprintsDependOnSeed: keys with one fingerprint in a shard have different ones in the
// next shard, so nobody can choose such keys.
func TestFingerprintsDependOnSeed(t *testing.T) {
	r := newRuled(t, Config{Shards: 2}) // each has its seed
	key := func(n uint32) (hash [keys.UniqueLen]byte) {
		binary.BigEndian.PutUint32(hash[:], n)
		return hash
	}
	const taken = 1 << 12
	for _, s := range r.shards {
		cache := &s.Ties.uniques
		cache.Forget()
		require.NoError(t, cache.List(func() bool { return false }))
		for n := range uint32(taken) {
			cache.Put(key(n), keys.UniqueValue{ID: keys.Nth(int(n))})
		}
	}
	mayExist := func(s *drivenShard, n uint32) bool {
		_, known := s.Ties.uniques.Peek(key(n))
		return !known
	}
	n := uint32(taken)
	for !mayExist(r.shards[0], n) {
		n++
	}
	require.False(t, mayExist(r.shards[1], n))
}

// TestTakeOverIsSmall: a task that takes the key of one at work does not write that one's record.
func TestTakeOverIsSmall(t *testing.T) {
	t.Parallel()
	r := newRuled(t, Config{})
	task := func(payload int) NewTask {
		return newTask(LaneKey{Queue: "a"}, record.Record{
			Head: record.Head{Ties: record.Ties{Flags: record.ReleaseOnClaim}}, UniqueKey: "k", Payload: make([]byte, payload),
		})
	}
	first := r.produce(task(1 << 20))[0]
	r.claim("a", 1)
	r.end()
	second := r.add(task(0))[0]
	require.NotEqual(t, first, second)
	require.Less(t, r.Group.Size(), 1<<10)
	r.settle()
}

// TestTakeOverBetweenSteps: the key of a task that is suspended is free for another one as soon as
// its step is stored, with and without Replace; a produce in the group of the step waits for that.
func TestTakeOverBetweenSteps(t *testing.T) {
	t.Parallel()
	for _, flags := range []uint8{record.ReleaseOnClaim, record.ReleaseOnClaim | record.ReplaceWaiting} {
		r := newRuled(t, Config{})
		task := newTask(LaneKey{Queue: "a"}, record.Record{Head: record.Head{Ties: record.Ties{Flags: flags}}, UniqueKey: "k"})
		first := r.produce(task)[0]
		g := r.claim("a", 1)
		r.in(func() (Verdict, error) {
			return r.Suspend(g[0].Receipt, 60_000, 0, &record.Step{Kind: record.StepSleep, Name: "s"})
		})
		require.NotEqual(t, first, r.add(task)[0])
		r.end()
	}
}
