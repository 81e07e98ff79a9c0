package engine

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"codeq/internal/record"
)

// TestEndsOfAttemptsReadNothing: the end of an attempt reads the task's record from memory if the
// record is small and all copies together are small; else from disk.
func TestEndsOfAttemptsReadNothing(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		size  int
		full  int // bytes of other copies
		reads bool
	}{
		{"small", 100, 0, false},
		{"large", copyCap, 0, true},
		{"beyond the bound", 100, copiesCap, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRuled(t, Config{})
			r.Leases.copies += c.full
			for name, end := range map[string]func(Receipt) (Verdict, error){
				"kept":     func(l Receipt) (Verdict, error) { return r.Complete(l, []byte("result"), nil, false) },
				"retried":  func(l Receipt) (Verdict, error) { return r.State.Fail(l, FailRetry, -1, "") },
				"dead":     func(l Receipt) (Verdict, error) { return r.State.Fail(l, FailDead, 0, "given up") },
				"released": func(l Receipt) (Verdict, error) { return r.State.Fail(l, FailRelease, 0, "") },
			} {
				payload := make([]byte, c.size)
				r.produce(newTask(LaneKey{Queue: name}, record.Record{Head: record.Head{Retention: record.Retention(-1)}, Payload: payload}))
				g := r.claim(name, 1)[0]
				rec, err := record.Decode(g.Rec)
				require.NoError(t, err)
				rec.Payload[0] = 'x' // it belongs to the worker
				before := r.ReadEntries
				r.in(func() (Verdict, error) { return end(g.Receipt) })
				require.Equal(t, c.reads, r.ReadEntries > before, name)
				r.end()
				require.Equal(t, payload, r.find(g.Receipt.ID).rec.Payload)
			}
			r.Leases.copies -= c.full
			r.settle()
		})
	}
}

// TestLeaseIsSmall: a shard keeps thousands of leases. A lease fits into 224 bytes, a size of Go's
// allocator; the next size is 240.
func TestLeaseIsSmall(t *testing.T) {
	require.LessOrEqual(t, unsafe.Sizeof(lease{}), uintptr(224))
}
