package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// bulkVerb is RedriveAllDead or PurgeDead.
type bulkVerb struct {
	name string
	call func(*codeq.Queue, context.Context, codeq.DeadFilter) (int, error)
	to   codeq.State // 0: removed
}

var bulks = []bulkVerb{
	{"RedriveAllDead", (*codeq.Queue).RedriveAllDead, codeq.Ready},
	{"PurgeDead", (*codeq.Queue).PurgeDead, 0},
}

// TestDeadLettersFilter: RedriveAllDead and PurgeDead change the selected dead letters, and no
// others.
func TestDeadLettersFilter(t *testing.T) {
	t.Parallel()
	for _, b := range bulks {
		t.Run(b.name, func(t *testing.T) {
			queuetest.InFlow(t, codeq.Options{Shards: 3}, func(f *queuetest.FlowTest) {
				ctx := context.Background()
				start := time.Now()
				for minute := range 4 {
					for _, queue := range []string{"a", "b"} {
						for _, tenant := range []string{"", "x", "", "x", "y", "y"} {
							queuetest.Produce(f.T, f.Q, codeq.Task{Queue: queue, Tenant: tenant, Payload: strconv.AppendInt(nil, int64(minute), 10)})
							require.NoError(f, f.Q.DeadLetter(ctx, f.Claim(queue).Receipt, nil))
						}
					}
					time.Sleep(time.Minute)
				}
				minute := func(n int) time.Time { return start.Add(time.Duration(n) * time.Minute) }
				for _, tc := range []struct {
					name  string
					which codeq.DeadFilter
					n     int
				}{
					{"of a queue that has none", codeq.DeadFilter{Queue: "c"}, 0},
					{"of a queue and a tenant", codeq.DeadFilter{Queue: "a", Tenants: []string{"x"}}, 8},
					{"of a queue and a tenant, again", codeq.DeadFilter{Queue: "a", Tenants: []string{"x"}}, 0},
					{"of tenants", codeq.DeadFilter{Tenants: []string{"x", ""}}, 24},
					{"of others", codeq.DeadFilter{Tenants: []string{"z"}}, 0},
					{"of a time", codeq.DeadFilter{From: minute(1), To: minute(2)}, 4},
					{"to a time", codeq.DeadFilter{To: minute(1)}, 4},
					{"from a time", codeq.DeadFilter{From: minute(3)}, 4},
					{"of the future", codeq.DeadFilter{From: minute(5), To: minute(100)}, 0},
					{"that match", codeq.DeadFilter{Match: func(i *codeq.TaskInfo) bool { return i.Queue == "b" && string(i.Payload) == "2" }}, 2},
					{"the rest", codeq.DeadFilter{}, 2},
				} {
					before := f.Counts("a").Dead + f.Counts("b").Dead
					n, err := b.call(f.Q, ctx, tc.which)
					require.NoError(f, err, tc.name)
					require.Equal(f, tc.n, n, tc.name)
					require.Equal(f, before-uint64(n), f.Counts("a").Dead+f.Counts("b").Dead, tc.name)
				}
				want := codeq.Counts{}
				if b.to == codeq.Ready {
					want.Ready = 24
				}
				require.Equal(f, want, f.Counts("a"))
				require.Equal(f, want, f.Counts("b"))
			})
		})
	}
}

func TestDeadLettersRefused(t *testing.T) {
	q := openLimited(t)
	for _, b := range bulks {
		for _, r := range []float64{-1, 1e9 + 1, math.Inf(1)} {
			q.refused("DeadFilter.Rate", r, "0 to 1e9", func() error {
				n, err := b.call(q.Queue, context.Background(), codeq.DeadFilter{Rate: r})
				require.Zero(t, n)
				return err
			})
		}
		_, err := b.call(q.Queue, context.Background(), codeq.DeadFilter{Rate: math.NaN()})
		require.ErrorIs(t, err, codeq.ErrInvalid)
		ended, end := context.WithCancelCause(context.Background())
		end(errBubbleOver)
		_, err = b.call(q.Queue, ended, codeq.DeadFilter{})
		require.ErrorIs(t, err, errBubbleOver)
	}
}

// TestDeadKinds: dead letters are counted by kind, in a queue or in all, over the shards, and so
// are the days of their deaths; a redrive and a purge by kind take them away, also after a restart.
func TestDeadKinds(t *testing.T) {
	t.Parallel()
	queuetest.InFlow(t, codeq.Options{Shards: 3}, func(f *queuetest.FlowTest) {
		ctx := context.Background()
		var last codeq.ID
		die := func(queue string, causes ...error) {
			for _, cause := range causes {
				last = f.ProduceAt(len(causes)%3, codeq.Task{Queue: queue})
				require.NoError(f, f.Q.DeadLetter(ctx, f.Claim(queue).Receipt, cause))
			}
		}
		refused := func(n int) error { return fmt.Errorf("connection %d refused", n) }
		kinds := func(queue string) (texts []string) {
			all, err := f.Q.DeadKinds(ctx, queue)
			require.NoError(f, err)
			for _, k := range all {
				require.False(f, k.Other)
				texts = append(texts, fmt.Sprintf("%s: %d of %v", k.Kind, k.Count, k.Queues))
			}
			return texts
		}
		require.Empty(f, kinds(""))
		die("a", refused(1), refused(2), errors.New("disk full"))
		time.Sleep(48 * time.Hour)
		die("b", refused(3))
		time.Sleep(time.Second)
		died := time.Now()
		die("a", refused(4), refused(5))
		want := []string{"connection # refused: 5 of [a b]", "disk full: 1 of [a]"}
		require.Equal(f, want, kinds(""))
		f.Reopen()
		require.Equal(f, want, kinds(""))
		require.Equal(f, []string{"connection # refused: 4 of [a]", "disk full: 1 of [a]"}, kinds("a"))
		require.Empty(f, kinds("c"))

		all, err := f.Q.DeadKinds(ctx, "")
		require.NoError(f, err)
		require.Equal(f, last, all[0].Last)
		require.True(f, died.Equal(all[0].LastAt), all[0].LastAt)
		days := all[0].Days
		require.Equal(f, uint64(3), days[0])
		require.Equal(f, uint64(2), days[2])

		r, err := f.Q.Bulk(ctx, codeq.BulkOptions{
			Action: codeq.BulkRedrive, TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Dead}, Queue: "a", ErrorKind: all[0].Kind},
		})
		require.NoError(f, err)
		require.Equal(f, 4, r.Matched)
		require.Equal(f, []string{"connection # refused: 1 of [b]", "disk full: 1 of [a]"}, kinds(""))
		_, err = f.Q.PurgeDead(ctx, codeq.DeadFilter{Queue: "b"})
		require.NoError(f, err)
		require.Equal(f, []string{"disk full: 1 of [a]"}, kinds(""))
	})
}
