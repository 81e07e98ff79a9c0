package cluster

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
)

// TestSilenceEndsJoin: the wait of a node that does not vote lasts as long as it gets further.
func TestSilenceEndsJoin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, _ := openTrio(t, 1)
		n, begun := nodes[1], time.Now()
		g := n.Group(0)
		g.configuration.set(1<<32, raft.Configuration{}) // it does not vote
		ctx, cancel := n.whileFurther(t.Context())
		defer cancel()
		for range 3 {
			time.Sleep(joinTimeout - time.Minute)
			g.receiver.bytes.Add(1)
		}
		require.NoError(t, ctx.Err())
		moved := time.Now()
		<-ctx.Done()
		require.InDelta(t, joinTimeout, time.Since(moved), float64(2*joinTimeout/looks))
		require.Greater(t, time.Since(begun), 3*joinTimeout)
		require.ErrorIs(t, base.EndOf(ctx), context.DeadlineExceeded)
		closeAll(t, nodes)
	})
}
