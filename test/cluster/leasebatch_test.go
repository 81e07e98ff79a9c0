package cluster_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/test/queuetest"
)

// leasedElsewhere returns leases of tasks that a node has claimed from a shard that another leads.
func leasedElsewhere(t *testing.T, caller *simNode, n int) (receipts []codeq.Receipt) {
	queuetest.Produce(t, simQueue(caller), tasksOfA(n)...)
	for len(receipts) < n {
		l, err := simQueue(caller).Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: time.Hour})
		require.NoError(t, err)
		receipts = append(receipts, l.Receipt)
	}
	return receipts
}

func tasksOfA(n int) (tasks []codeq.Task) {
	for range n {
		tasks = append(tasks, codeq.Task{Queue: "a"})
	}
	return tasks
}

// TestLeaseBatchElsewhere: a batch of a node that does not lead the shard costs one commit there,
// and each task has the verdict that it has for a caller of the leader.
func TestLeaseBatchElsewhere(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		leader, caller := c.lead()
		receipts := leasedElsewhere(t, caller, 50)
		require.NoError(t, simQueue(leader).Cancel(t.Context(), receipts[7].ID))
		before := inspect.Of(simQueue(leader)).Commits()
		completions := make([]codeq.Completion, len(receipts))
		for i, r := range receipts {
			completions[i].Receipt = r
		}
		err := simQueue(caller).CompleteBatch(t.Context(), completions)
		require.LessOrEqual(t, inspect.Of(simQueue(leader)).Commits()-before, uint64(1))
		var batch *codeq.BatchError
		require.ErrorAs(t, err, &batch)
		require.Len(t, batch.Unwrap(), 1)
		require.ErrorIs(t, batch.Errors[7], codeq.ErrLeaseLost)
		require.ErrorIs(t, batch.Errors[7], codeq.ErrCanceled)
	})
}

// TestLeaseBatchWithoutAnswer: the answer to a batch is lost, and the next try finds no lease: it
// is not known whether the first one has ended them. For an extension it is.
func TestLeaseBatchWithoutAnswer(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		leader, caller := c.lead()
		receipts := leasedElsewhere(t, caller, 10)
		lost := func(call func() error) *codeq.BatchError {
			c.net.SetCut(leader.name, caller.name, true)
			done := make(chan error, 1)
			go func() { done <- call() }()
			time.Sleep(100 * time.Millisecond)
			c.net.Heal(true)
			var batch *codeq.BatchError
			require.ErrorAs(t, <-done, &batch)
			return batch
		}
		batch := lost(func() error { return simQueue(caller).ReleaseBatch(context.Background(), receipts, time.Hour) })
		for _, err := range batch.Errors {
			require.ErrorIs(t, err, codeq.ErrUncertain)
			require.NotErrorIs(t, err, codeq.ErrLeaseLost)
		}
		batch = lost(func() error { return simQueue(caller).ExtendBatch(context.Background(), receipts, time.Hour) })
		for _, err := range batch.Errors {
			require.ErrorIs(t, err, codeq.ErrLeaseLost)
		}
		require.EqualValues(t, 10, queuetest.CountsOf(t, simQueue(leader), "a").Scheduled)
	})
}
