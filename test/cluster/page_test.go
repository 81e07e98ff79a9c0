package cluster_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// TestPagesOfNodes: the pages of a list may come from several nodes, each leading some of the
// shards.
func TestPagesOfNodes(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	qs := threeNodes(t, codeq.Options{Shards: 3, Durability: codeq.DurabilityNone}, nil)
	for _, q := range qs {
		require.NoError(t, q.WaitReady(ctx))
	}
	var want []codeq.ID
	for i := range 60 {
		id, err := qs[i%3].Produce(ctx, codeq.Task{Queue: "a", Payload: make([]byte, 3), Unique: codeq.Unique{Key: fmt.Sprint(i)}})
		require.NoError(t, err)
		want = append(want, id)
	}
	leased, err := qs[0].ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"a"}, Max: 20})
	require.NoError(t, err)
	for _, states := range [][]codeq.State{{codeq.Ready}, {codeq.Leased}, nil} {
		var at []codeq.ID
		for _, newest := range []bool{false, true} {
			o := codeq.PageOptions{TaskFilter: codeq.TaskFilter{States: states, Queue: "a"}, Limit: 7, Newest: newest}
			var got []codeq.ID
			for n := 0; n == 0 || o.Cursor != ""; n++ {
				o.NoPayload = n%2 > 0
				p, err := qs[n%3].ListPage(ctx, o)
				require.NoError(t, err)
				for _, i := range p.Tasks {
					require.Len(t, i.Payload, 3*(1-n%2))
					got = append(got, i.ID)
				}
				o.Cursor = p.Next
			}
			if newest && states != nil {
				slices.Reverse(got)
				require.Equal(t, at, got)
			}
			at = got
		}
		n := len(want)
		switch {
		case states == nil:
		case states[0] == codeq.Leased:
			n = len(leased)
		default:
			n -= len(leased)
		}
		require.Len(t, at, n)
		require.Subset(t, want, at)
	}
	for i, id := range want {
		info, err := qs[(i+1)%3].FindByKey(ctx, codeq.UniqueKey{Queue: "a", Key: fmt.Sprint(i)})
		require.NoError(t, err)
		require.Equal(t, id, info.ID)
	}
	r, err := qs[1].Bulk(ctx, codeq.BulkOptions{Action: codeq.BulkCancel, TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Ready, codeq.Leased}}})
	require.NoError(t, err)
	require.Equal(t, codeq.BulkResult{Matched: 60, Changed: 60}, r)
	queuetest.RequireOddTexts(t, qs[0], qs[1])
}
