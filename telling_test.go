package codeq

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/testkit"
)

// TestTellChildrenInPieces: the end of a task for which many wait is told in small groups, of which
// a crash or a close may interrupt any; a redrive or a purge of the task waits until
// all know, so that each of them knows of this end.
func TestTellChildrenInPieces(t *testing.T) {
	n := testkit.Sized(1500, 4000, 100_000)
	ctx := context.Background()
	ends := map[string]func(f *FlowTest, l *Lease){
		"done":   func(f *FlowTest, l *Lease) { require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil)) },
		"dead":   func(f *FlowTest, l *Lease) { require.NoError(f, f.Q.DeadLetter(ctx, l.Receipt, nil)) },
		"cancel": func(f *FlowTest, l *Lease) { require.NoError(f, f.Q.Cancel(ctx, l.ID)) },
	}
	then := map[string]func(f *FlowTest, parent ID){
		"nothing": func(*FlowTest, ID) {},
		"reopen":  func(f *FlowTest, _ ID) { require.NoError(f, f.Q.Close()); f.Open() },
		"redrive": func(f *FlowTest, parent ID) {
			if err := f.Q.RedriveDead(ctx, parent); err == nil {
				require.NoError(f, f.Q.Complete(ctx, f.Claim("parents").Receipt, nil))
			}
		},
		"purge": func(f *FlowTest, _ ID) {
			_, err := f.Q.PurgeDead(ctx, DeadFilter{})
			require.NoError(f, err)
		},
	}
	for _, shards := range []int{1, 3} {
		for end, finish := range ends {
			for next, do := range then {
				t.Run(fmt.Sprintf("%s, %s, %d shards", end, next, shards), func(t *testing.T) {
					t.Parallel()
					inFlow(t, Options{Shards: shards, Limits: Limits{Parents: 1 << 20}}, func(f *FlowTest) {
						parent := produce(t, f.Q, Task{Queue: "parents"})[0]
						for i := 0; i < n; i += 500 {
							tasks := make([]Task, 500)
							for j := range tasks {
								onDead := OnDead(j % 3)
								tasks[j] = Task{Queue: fmt.Sprint("children", onDead), After: []ID{parent}, OnDead: onDead}
							}
							f.Batch(tasks...)
						}
						f.Check()
						l := f.Claim("parents")
						for i := range f.Q.replicas {
							slowDown(t, f.Q, i, time.Millisecond)
						}
						finish(f, l)
						require.NoError(t, f.Q.checkAll(), "amid")
						do(f, parent)
						for i := range f.Q.replicas { // as long as somebody tells
							s, err := f.Q.shard(i), errBusy
							for tries := 0; errors.Is(err, errBusy) && tries < n; tries++ {
								time.Sleep(time.Millisecond)
								err = s.probe(func(s *shard) error {
									if s.Probe().Usage().Telling > 0 || s.isSending() || s.due() {
										return errBusy
									}
									return nil
								})
							}
							require.NoError(t, err)
						}
						synctest.Wait()
						third := uint64(n / 3)
						for onDead := HoldOnDead; onDead <= RunOnDead; onDead++ {
							queue := fmt.Sprint("children", onDead)
							got := countsOf(t, f.Q, queue)
							switch {
							case end == "done", end == "dead" && onDead == RunOnDead:
								require.InDelta(t, third, got.Ready, 500, queue)
								require.Equal(t, Counts{Ready: got.Ready}, got, queue)
							case end == "cancel", onDead == CancelOnDead, next == "purge":
								require.Equal(t, Counts{}, got, queue)
							case next == "redrive":
								require.InDelta(t, third, got.Ready, 500, queue)
							default:
								require.InDelta(t, third, got.Blocked, 500, queue)
							}
						}
						st, err := f.Q.StorageStats()
						require.NoError(t, err)
						told := int64(0)
						for _, s := range st.Shards {
							told += s.Upkeep[UpkeepTell].Count
							require.LessOrEqual(t, s.Upkeep[UpkeepTell].MaxRecords, int64(2100))
						}
						require.Positive(t, told)
					})
				})
			}
		}
	}
}
