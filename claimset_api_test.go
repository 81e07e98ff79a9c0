package codeq_test

import (
	"sync"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestSetsAndQueuesTakeTurns: of claims for one queue and claims for a list that has it,
// none waits for the end of the others.
func TestSetsAndQueuesTakeTurns(t *testing.T) {
	names, _ := manyQueues(100)
	bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		served := make(map[string]int)
		var mu sync.Mutex
		claim := func(kind string, queues []string) {
			for {
				if _, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: queues}); err != nil {
					return
				}
				mu.Lock()
				served[kind]++
				mu.Unlock()
			}
		}
		for range 4 {
			go claim("one", names[7:8])
			go claim("many", names)
		}
		synctest.Wait()
		for range 40 {
			produce(t, q, codeq.Task{Queue: names[7]})
			synctest.Wait()
		}
		mu.Lock()
		defer mu.Unlock()
		require.GreaterOrEqual(t, served["one"], 10)
		require.GreaterOrEqual(t, served["many"], 10)
	})
}
