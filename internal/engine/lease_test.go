package engine

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/recurrence"
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
				"kept":      func(l Receipt) (Verdict, error) { return r.Complete(l, []byte("result"), 0, nil, false) },
				"retried":   func(l Receipt) (Verdict, error) { return r.State.Fail(l, FailRetry, nil, -1, "") },
				"dead":      func(l Receipt) (Verdict, error) { return r.State.Fail(l, FailDead, nil, 0, "given up") },
				"unhandled": func(l Receipt) (Verdict, error) { return r.State.Fail(l, FailUnhandled, nil, 0, "") },
				"released":  func(l Receipt) (Verdict, error) { return r.State.Fail(l, FailRelease, nil, 0, "") },
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

// TestKindsNeedTheirFormat: a shard of an earlier format takes no task, follow-up and schedule with
// a kind, or a key with MaxWait or ReleaseOnClaim: other nodes may not read it.
func TestKindsNeedTheirFormat(t *testing.T) {
	t.Parallel()
	r := newRuled(t, Config{})
	lane := LaneKey{Queue: "a"}
	plain, kind := newTask(lane, record.Record{}), newTask(lane, record.Record{Kind: "k"})
	r.produce(plain)
	g := r.claim("a", 1)[0]
	r.begin(r.drivenShard)
	r.Format = keys.FormatOfKinds - 1
	_, err := r.Produce([]NewTask{plain, kind}, new(keys.CallNumber), new(Produced))
	require.ErrorIs(t, err, base.ErrFormat)
	for _, head := range []record.Head{{MaxWait: 1}, {Ties: record.Ties{Flags: record.ReleaseOnClaim}}} {
		head.Unique[0] = 1
		keyed := newTask(lane, record.Record{Head: head, UniqueKey: "k"})
		_, err := r.Produce([]NewTask{keyed}, new(keys.CallNumber), new(Produced))
		require.ErrorIs(t, err, base.ErrFormat)
	}
	_, err = r.Complete(g.Receipt, nil, 0, []NewTask{kind}, false)
	require.ErrorIs(t, err, base.ErrFormat)
	every := recurrence.Every{Interval: 1000}
	schedule := keys.ScheduleValue{Queue: "a", Every: 1000, Record: kind.Rec}
	require.ErrorIs(t, r.Times.SetSchedule("s", schedule, every), base.ErrFormat)
	schedule.Record, schedule.Jitter = plain.Rec, 1
	require.ErrorIs(t, r.Times.SetSchedule("s", schedule, every), base.ErrFormat)
	schedule.Jitter = 0
	require.NoError(t, r.Times.SetSchedule("s", schedule, every))
	require.NoError(t, r.Times.DeleteSchedule("s"))
	r.Format++
	v, err := r.Complete(g.Receipt, nil, 0, []NewTask{kind}, false)
	require.NoError(t, err)
	require.Equal(t, Decided, v)
	r.settle()
	require.EqualValues(t, 1, r.countsOf("a").Ready)
}
