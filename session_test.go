package codeq

import (
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
)

// TestForgottenSession: produces of a node may be in the same group as its removal, before it and after it.
func TestForgottenSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{})
		s := q.led()[0]
		produce := func(seq uint64) *produceOp {
			op := &produceOp{completion: newCompletion(), call: callNumber{node: "gone", session: 1, seq: seq, low: seq}}
			op.tasks = []newTask{prepare(&Task{Queue: "a"}, nil)}
			return op
		}
		gone := func() *interestOp { return &interestOp{completion: newCompletion(), node: "gone", gone: true} }
		stored := func() []byte {
			v, err := lookup(s.store.db, keys.AppendNamed(nil, keys.Session, "gone"))
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
		group(produce(1), gone())
		require.Nil(t, stored())
		group(produce(2), gone(), produce(3))
		v, err := keys.ParseSession(stored())
		require.NoError(t, err)
		require.Len(t, v.Calls, 1)
		require.EqualValues(t, 3, v.Calls[0].Seq)
		require.Equal(t, Counts{Ready: 3}, countsOf(t, q, "a"))
		require.NoError(t, q.checkAll())
	})
}
