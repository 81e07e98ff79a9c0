package codeq

import (
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/schema"
)

// TestForgottenSession: produces of a node may be in the same group as its removal, before it
// and after it; one of before that arrives again is not stored twice.
func TestForgottenSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{})
		s := q.led()[0]
		produce := func(seq uint64) *produceOp {
			op := &produceOp{completion: newCompletion(), call: engine.CallNumber{Node: "gone", Session: 1, Seq: seq, Low: seq}}
			op.tasks = []engine.NewTask{prepare(&Task{Queue: "a"}, nil)}
			return op
		}
		gone := func() *interestOp { return &interestOp{completion: newCompletion(), node: "gone", gone: true} }
		stored := func() keys.SessionValue {
			b, err := schema.Lookup(s.Store.DB(), keys.AppendNamed(nil, keys.Session, "gone"))
			require.NoError(t, err)
			v, err := keys.ParseSession(b)
			require.NoError(t, err)
			return v
		}
		group := func(ops ...request) {
			goOn := standStill(s)
			for _, op := range ops {
				require.NoError(t, s.inbox.push(t.Context(), op))
			}
			goOn()
			for _, op := range ops {
				require.NoError(t, <-op.base().done)
			}
		}
		again := func(seq uint64) error {
			op := produce(seq)
			settled, err := s.do(t.Context(), op, op.base())
			require.True(t, settled)
			return err
		}
		group(produce(1), gone())
		require.Equal(t, keys.SessionValue{Session: 1, Low: 2}, stored())
		require.ErrorIs(t, again(1), ErrUncertain)
		group(produce(2), produce(4), gone(), produce(5))
		require.Equal(t, []uint64{5, 1}, []uint64{stored().Low, uint64(len(stored().Calls))})
		for _, seq := range []uint64{1, 2, 3, 4} {
			require.ErrorIs(t, again(seq), ErrUncertain, seq)
		}
		require.NoError(t, again(5))
		require.NoError(t, s.probe(func(s *shard) error { return s.Probe().ReloadSessions() }))
		require.ErrorIs(t, again(4), ErrUncertain)
		require.NoError(t, again(5))
		require.Equal(t, Counts{Ready: 4}, countsOf(t, q, "a"))
		require.NoError(t, q.checkAll())
	})
}
