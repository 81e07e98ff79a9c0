package workload

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
)

// Each feature leaves nothing but what it keeps, stocked or not.
func TestFeatures(t *testing.T) {
	for _, f := range Features() {
		t.Run(f.Name, func(t *testing.T) {
			q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: 2, Durability: codeq.DurabilityNone})
			require.NoError(t, err)
			defer func() { require.NoError(t, q.Close()) }()
			l := FeatureLoad{Feature: f, Queues: []*codeq.Queue{q}, Tasks: 2500, Workers: 16}
			for _, stocked := range []bool{true, false} {
				var before codeq.Counts
				r, err := l.Run(t.Context(), stocked, func() error {
					stats, err := q.Stats(t.Context())
					before = stats[QueueName]
					return err
				})
				require.NoError(t, err)
				require.Equal(t, []int{l.Tasks, l.Tasks}, []int{r.Produced, r.Ended})
				require.Equal(t, stocked, before.Total() > uint64(l.First))
				l.First += l.Tasks
			}
			stats, err := q.Stats(t.Context())
			require.NoError(t, err)
			var left codeq.Counts
			switch f.Name {
			case "kept":
				left.Done = uint64(l.First)
			case "dead":
				left.Dead = uint64(l.First)
			}
			require.Equal(t, left, stats[QueueName])
		})
	}
}

func TestOfManyTasksTheFirstAreWorkedOff(t *testing.T) {
	l := FeatureLoad{Feature: FeatureNamed("plain"), Tasks: 10_000_000}
	require.Equal(t, 2_000_000, l.Worked())
	l.Whole = true
	require.Equal(t, l.Tasks, l.Worked())
	l.Whole, l.Feature = false, FeatureNamed("retried")
	require.Equal(t, l.Tasks, l.Worked())
}
