package codeq

import (
	"context"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/call"
	"codeq/internal/engine"
)

// bulkVerb is RedriveAllDead or PurgeDead.
type bulkVerb struct {
	Name string
	Call func(*Queue, context.Context, DeadFilter) (int, error)
	To   State // 0: gone
}

var bulks = []bulkVerb{{"RedriveAllDead", (*Queue).RedriveAllDead, Ready}, {"PurgeDead", (*Queue).PurgeDead, 0}}

// TestDeadLettersOfManyGroups: more than one operation, and one commit, is about.
func TestDeadLettersOfManyGroups(t *testing.T) {
	t.Parallel()
	for _, b := range bulks {
		t.Run(b.Name, func(t *testing.T) {
			bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
				ctx := context.Background()
				const n = 4*bulkCap + 30
				_, err := q.startingAt(0).ProduceBatch(ctx, slices.Repeat([]Task{{Queue: "a", Payload: make([]byte, 5<<10)}}, n-10))
				require.NoError(t, err)
				produce(t, q, slices.Repeat([]Task{{Queue: "a"}}, 10)...)
				for range n {
					require.NoError(t, q.DeadLetter(ctx, claimNow(t, q, "a").Receipt, nil))
				}
				done, err := b.Call(q, ctx, DeadFilter{})
				require.NoError(t, err)
				require.Equal(t, n, done)
				require.NoError(t, q.checkMemory())
				want := Counts{}
				if b.To == Ready {
					want.Ready = n
				}
				require.Equal(t, want, countsOf(t, q, "a"))
			})
		})
	}
}

// TestDeadLettersTwice: of operations that are decided in one group, one redrives a dead letter.
func TestDeadLettersTwice(t *testing.T) {
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *Process) {
		ids := p.StoreDead(3, Task{Queue: "a"})
		p.Step()
		done := 0
		require.NoError(t, p.shard(0).probe(func(s *shard) error {
			for range 2 {
				bulk := &call.Bulk{BulkAlteration: engine.BulkAlteration{How: engine.AlterRedrive}}
				for _, id := range ids {
					bulk.IDs = append(bulk.IDs, id)
				}
				rule(callBulk, bulk).resolve(s)
				done += bulk.N
			}
			return nil
		}))
		require.Equal(t, len(ids), done)
		p.Step()
		require.Equal(t, Counts{Ready: 3}, countsOf(t, p.Queue, "a"))
	})
}
