package killtest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/keys"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
)

// The crash tests run a child that works on a queue at full load. On its standard output the child
// reports the acknowledgements. The parent kills the child with SIGKILL at a random moment, opens
// the queue and compares.

// crashConfig is the configuration of a child.
type crashConfig struct {
	Dir   string
	Level codeq.Durability
}

func crashOptions(level codeq.Durability) *codeq.Options {
	return &codeq.Options{
		Shards: 2, Durability: level, MemTableBytes: 512 << 10,
		WindowTasks: 16, LeaseFor: time.Minute, MaxAttempts: 1 << 14,
	}
}

const crashProducers, crashWorkers = 8, 16

func crashChild(c crashConfig) error {
	q, err := codeq.Open(c.Dir, crashOptions(c.Level))
	if err != nil {
		return err
	}
	errs := make(chan error)
	for p := range crashProducers {
		go func() { errs <- crashProduce(q, p) }()
	}
	for range crashWorkers {
		go func() { errs <- crashWork(q) }()
	}
	return <-errs
}

func crashProduce(q *codeq.Queue, producer int) error {
	for n := 0; ; n++ {
		t := codeq.Task{Queue: "crash", Payload: []byte(fmt.Sprint(producer, " ", n)), Priority: n % 2}
		id, err := q.Produce(context.Background(), t)
		if err != nil {
			return err
		}
		nodeEvent{kind: nodeProduced, id: id, number: uint64(producer)}.report()
	}
}

// crashWork completes most of the tasks that it claims, returns some, and
// keeps some until the end.
func crashWork(q *codeq.Queue) error {
	ctx := context.Background()
	for {
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"crash"}})
		if err != nil {
			return err
		}
		nodeEvent{kind: nodeClaimed, id: l.ID, attempt: l.Attempt}.report()
		switch fate := rand.IntN(16); {
		case fate == 0:
			err = q.Retry(ctx, l.Receipt, codeq.RetryOptions{After: -1})
		case fate == 1:
			err = q.Release(ctx, l.Receipt, time.Millisecond)
		case fate == 2:
			continue
		case fate == 3:
			if err = q.Extend(ctx, l.Receipt, time.Hour); err != nil {
				break
			}
			fallthrough
		default:
			nodeEvent{kind: nodeFinishing, id: l.ID}.report()
			if err = q.Complete(ctx, l.Receipt, nil); err == nil {
				nodeEvent{kind: nodeCompleted, id: l.ID}.report()
			}
		}
		if err != nil {
			return err
		}
	}
}

// crashHistory has the reports of children on the tasks in one directory.
type crashHistory struct {
	order     []codeq.ID // of acknowledged produces
	producer  map[codeq.ID]uint64
	attempts  map[codeq.ID]int
	finishing map[codeq.ID]bool
	completed map[codeq.ID]bool
}

func newCrashHistory() *crashHistory {
	return &crashHistory{
		producer: map[codeq.ID]uint64{}, attempts: map[codeq.ID]int{}, finishing: map[codeq.ID]bool{}, completed: map[codeq.ID]bool{},
	}
}

func (h *crashHistory) add(e nodeEvent) {
	switch e.kind {
	case nodeProduced:
		h.order = append(h.order, e.id)
		h.producer[e.id] = e.number
	case nodeClaimed:
		h.attempts[e.id] = max(h.attempts[e.id], e.attempt)
	case nodeFinishing:
		h.finishing[e.id] = true
	case nodeCompleted:
		h.completed[e.id] = true
	}
}

// runAndKill runs a child until it has reported that many events, and kills it.
func (h *crashHistory) runAndKill(t *testing.T, dir string, level codeq.Durability, n int) {
	t.Helper()
	enough := make(chan struct{})
	c := start(t, command(t, thisBuild(t), "crash", crashConfig{dir, level}), events(t, func(e nodeEvent) {
		if h.add(e); n == 1 {
			close(enough)
		}
		n--
	}))
	select {
	case <-enough:
	case <-c.read:
	}
	require.NoError(t, c.Process.Kill())
	require.Error(t, c.wait(), "the child was to be killed")
}

// stored opens the queue and returns all its tasks. It checks that the data on disk do not
// contradict each other.
func stored(t *testing.T, dir string, level codeq.Durability) map[codeq.ID]*codeq.TaskInfo {
	t.Helper()
	q, err := codeq.Open(dir, crashOptions(level))
	require.NoError(t, err)
	tasks := make(map[codeq.ID]*codeq.TaskInfo)
	for _, state := range []codeq.State{codeq.Leased, codeq.Scheduled, codeq.Ready, codeq.Dead} { // in the order of their progress
		for info, err := range q.List(context.Background(), codeq.ListOptions{State: state}) {
			require.NoError(t, err)
			tasks[info.ID] = info
		}
	}
	require.NoError(t, q.Close())
	report, err := codeq.Verify(dir, nil)
	require.NoError(t, err)
	require.True(t, report.OK(), "%v", report.Problems)
	return tasks
}

// crashRounds is the number of kills at each level.
func crashRounds() int { return testkit.Sized(6, 30) }

// TestKillLosesNothing: at the levels process and disk, all operations acknowledged before a kill
// -9 have their effect afterwards.
func TestKillLosesNothing(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for _, level := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityDisk} {
		t.Run(level.String(), func(t *testing.T) {
			t.Parallel()
			random := testkit.Seeded(t)
			dir := t.TempDir()
			h := newCrashHistory()
			for range crashRounds() {
				h.runAndKill(t, dir, level, 100+random.IntN(2000))
				tasks := stored(t, dir, level)
				for _, id := range h.order {
					info := tasks[id]
					switch {
					case h.completed[id]:
						require.Nil(t, info, "completed task %s is back", id)
					case !h.finishing[id]:
						require.NotNil(t, info, "task %s is lost", id)
					}
					if info != nil {
						// A released attempt does not count, but no later attempt has a lower
						// number.
						require.GreaterOrEqual(t, info.Attempts, h.attempts[id]-1, "attempts of task %s", id)
						if info.State == codeq.Leased {
							require.GreaterOrEqual(t, info.Attempts, h.attempts[id], "attempts of leased task %s", id)
						}
					}
				}
			}
			require.NotEmpty(t, h.completed)
			t.Logf("%d kills, %d tasks acknowledged, %d completed", crashRounds(), len(h.order), len(h.completed))
		})
	}
}

// TestKillWithoutDurability: at the level none, a kill -9 loses the last acknowledged operations
// and nothing else: a prefix of each producer's tasks in a shard is left.
func TestKillWithoutDurability(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	random := testkit.Seeded(t)
	lost := 0
	for range crashRounds() {
		dir := t.TempDir()
		h := newCrashHistory()
		h.runAndKill(t, dir, codeq.DurabilityNone, 100+random.IntN(2000))
		tasks := stored(t, dir, codeq.DurabilityNone)
		type line struct {
			producer uint64
			shard    int
		}
		ended := make(map[line]codeq.ID)
		for _, id := range h.order {
			if h.finishing[id] {
				continue
			}
			l := line{h.producer[id], keys.ShardOf(keys.ID(id), 2)}
			if tasks[id] == nil {
				ended[l] = id
				lost++
			} else if first, ok := ended[l]; ok {
				t.Fatalf("task %s is there, and %s, acknowledged before, is not", id, first)
			}
		}
	}
	require.Positive(t, lost, "a kill at the level none is expected to lose something")
	t.Logf("%d kills lost %d acknowledged tasks", crashRounds(), lost)
}
