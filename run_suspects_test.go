package codeq_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/offline"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// suspectMix is a queue with all kinds of tasks in all kinds of queues. One or two tasks kill each
// process that works on them. The processes differ in their options, workers and shards; some are
// killed from outside, some close the queue in order, and some go on with a copy of it. The price
// of each end of a process, for each task, is compared with the rule.
type suspectMix struct {
	*testing.T
	*rand.Rand
	disk   *crashfs.Disk
	opts   codeq.Options
	good   map[string]time.Duration // how long it is at work, by name
	poison map[string]time.Duration // how long it takes to kill the process
	bound  int                      // on kills from inside
	fast   bool                     // suspects pass before they can kill the process

	canceled, purged, redriven map[string]bool
	inside, outside, ends      int
	said                       []string
	end                        func() // ends the process
}

func (m *suspectMix) oneIn(n int) bool { return m.IntN(n) == 0 }

func (m *suspectMix) say(format string, args ...any) {
	m.said = append(m.said, fmt.Sprintf(format, args...))
}

func pick[T any](m *suspectMix, of ...T) T { return of[m.IntN(len(of))] }

var mixQueues = []string{"a", "b", "c"}

// begin makes the queue.
func (m *suspectMix) begin() {
	m.disk = crashfs.New()
	m.good, m.poison = make(map[string]time.Duration), make(map[string]time.Duration)
	m.canceled, m.purged, m.redriven = make(map[string]bool), make(map[string]bool), make(map[string]bool)
	m.opts = codeq.Options{
		Shards: 1 + m.IntN(4), Durability: codeq.DurabilityDisk, Retention: codeq.Forever,
		SuspectFor: pick(m, time.Millisecond, time.Second, time.Minute, 24*time.Hour), Backoff: codeq.Backoff{Base: time.Second, Max: time.Minute},
	}
	m.fast = m.opts.SuspectFor < time.Second
	m.say("SuspectFor %v", m.opts.SuspectFor)
	q := m.open("q", m.opts.Shards)
	for _, name := range mixQueues {
		m.configure(q, name)
	}
	var ids []codeq.ID
	for i := range 4 + m.IntN(8) {
		task := codeq.Task{
			Queue: pick(m, mixQueues...), Tenant: pick(m, "", "", "t"), Priority: m.IntN(3), Headers: map[string]string{"name": fmt.Sprint("good ", i)},
		}
		if n := i - 2; n >= 0 && n < 2 && (n == 0 || m.oneIn(2)) {
			task.Headers["name"] = fmt.Sprint("poison ", n)
			task.MaxAttempts = 1 + m.IntN(3)
			m.bound += task.MaxAttempts
			m.poison[task.Headers["name"]] = time.Duration(m.IntN(30)) * time.Millisecond
		} else {
			m.good[task.Headers["name"]] = time.Duration(m.IntN(60)) * time.Millisecond
			task.MaxAttempts = pick(m, 0, 25)
		}
		switch m.IntN(6) {
		case 0:
			task.Group = pick(m, "x", "y")
		case 1:
			task.LimitKey = "k"
		case 2:
			task.RunAt = time.Now().Add(time.Duration(m.IntN(100)) * time.Millisecond)
		case 3:
			task.Timeout = time.Hour
		case 4:
			if len(ids) > 0 {
				task.After, task.OnDead = []codeq.ID{pick(m, ids...)}, codeq.RunOnDead
			}
		}
		ids = append(ids, queuetest.Produce(m.T, q, task)[0])
	}
	m.end()
	m.end = func() {}
}

// configure draws the limits of a queue.
func (m *suspectMix) configure(q *codeq.Queue, queue string) {
	var set codeq.Settings
	switch m.IntN(5) {
	case 0:
		set.Concurrency = 1 + m.IntN(3)
	case 1:
		set.Rate, set.Burst = 20, 1+m.IntN(3)
	case 2:
		set.ConcurrencyPerKey = 1
	case 3:
		set.HoldGroups = true
	}
	require.NoError(m, q.Configure(m.Context(), queue, func(s *codeq.Settings) { *s = set }))
}

// open opens the queue in a directory as a process does.
func (m *suspectMix) open(dir string, shards int) *codeq.Queue {
	opts := m.opts
	opts.Shards, opts.MaxAttempts = shards, pick(m, 25, 8)
	inspect.Options(&opts).FS = m.disk
	q, err := codeq.Open(dir, &opts)
	require.NoError(m, err)
	m.end = func() { require.NoError(m, q.Close()) }
	return q
}

// tasks returns all tasks by name.
func (m *suspectMix) tasks(q *codeq.Queue) map[string]*codeq.TaskInfo {
	all := make(map[string]*codeq.TaskInfo)
	for state := codeq.Ready; state <= codeq.Canceled; state++ {
		for info, err := range q.List(m.Context(), codeq.ListOptions{State: state}) {
			require.NoError(m, err)
			all[info.Headers["name"]] = info
		}
	}
	return all
}

// left returns the tasks as a process has left them.
func (m *suspectMix) left(disk *crashfs.Disk, dir string) map[string]*codeq.TaskInfo {
	opts := codeq.Options{Tool: true}
	inspect.Options(&opts).FS = disk.Clone()
	q, err := codeq.Open(dir, &opts)
	require.NoError(m, err)
	defer func() { require.NoError(m, q.Close()) }()
	return m.tasks(q)
}

// pays compares the tasks after Open with the tasks that the previous process left.
func (m *suspectMix) pays(before, after map[string]*codeq.TaskInfo, killed bool) {
	suspects := 0
	for _, b := range before {
		if b.State == codeq.Leased && b.Suspect {
			suspects++
		}
	}
	for name, b := range before {
		a := after[name]
		require.NotNil(m, a, name)
		attempts, crashes, suspect := b.Attempts, b.Crashes, b.Suspect
		switch {
		case b.State != codeq.Leased: // it is cleared now, or when it is leased
			suspect = b.Suspect && a.Suspect
		case !killed:
			attempts--
		case b.Suspect && suspects == 1:
		default:
			attempts--
			crashes++
			suspect = b.Suspect || suspects == 0
		}
		if a.State == codeq.Dead {
			suspect = false
		}
		if b.State == codeq.Leased {
			m.say("  %s (%v) attempts %d crashes %d suspect %t", name, a.State, a.Attempts, a.Crashes, a.Suspect)
		}
		if attempts != a.Attempts || crashes != a.Crashes || suspect != a.Suspect {
			m.Fatalf("%s was %v with %d attempts, %d crashes, suspect %t; it is %v with %d, %d, %t, expected %d, %d, %t; killed %t with %d suspects at work\n%s",
				name, b.State, b.Attempts, b.Crashes, b.Suspect, a.State, a.Attempts, a.Crashes, a.Suspect, attempts, crashes, suspect, killed, suspects, strings.Join(m.said, "\n"))
		}
	}
}

// work starts the workers of a process: one or several calls of Run, or of Claim. die kills the
// process.
func (m *suspectMix) work(q *codeq.Queue, die func()) (end func()) {
	handle := func(ctx context.Context, name string) error {
		wait, poison := m.poison[name]
		if !poison {
			wait = m.good[name]
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return ctx.Err()
		}
		if poison {
			die()
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	var done []chan struct{}
	start := func(work func()) {
		end := make(chan struct{})
		done = append(done, end)
		go func() { defer close(end); work() }()
	}
	if m.oneIn(5) { // Claim
		m.say("Claim")
		for range 1 + m.IntN(6) {
			start(func() {
				for {
					l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: mixQueues, Local: true})
					if err != nil {
						return
					}
					if handle(ctx, l.Headers["name"]) == nil {
						_ = q.Complete(ctx, l.Receipt, nil) // or the process has ended
					}
				}
			})
		}
	} else {
		runs := [][]string{mixQueues}
		if m.oneIn(2) {
			runs = [][]string{mixQueues[:1], mixQueues[1:], mixQueues}[:2+m.IntN(2)]
		}
		for _, queues := range runs {
			var mux codeq.Mux
			for _, name := range queues {
				codeq.Handle(&mux, name, func(ctx context.Context, j *codeq.Job[[]byte]) error {
					return handle(ctx, j.Headers["name"])
				})
			}
			n := 1 + m.IntN(8)
			m.say("Run of %v with %d", queues, n)
			start(func() { _ = q.Run(ctx, &mux, &codeq.RunOptions{Concurrency: n, Grace: -1}) })
		}
	}
	return func() {
		cancel()
		for _, d := range done {
			<-d
		}
	}
}

// live runs one process and returns how it has ended: "" means that nothing is left to do.
func (m *suspectMix) live(q *codeq.Queue) string {
	died := make(chan struct{}, 100)
	end := m.work(q, func() { died <- struct{}{} })
	idleCtx, stopWaiting := context.WithCancel(context.Background())
	idle := make(chan error, 1)
	go func() { idle <- q.WaitIdle(idleCtx) }()
	m.end = func() {
		stopWaiting()
		<-idle
		end()
		require.NoError(m, q.Close())
		m.end = func() {}
	}
	kill := func() {
		if m.oneIn(2) {
			synctest.Wait()
		}
		disk := m.disk.Clone()
		m.end()
		m.disk = disk
	}
	deadline := time.Now().Add(30 * 24 * time.Hour)
	meddled := 0
	for {
		wait := 20 * time.Hour
		if meddled < 4 {
			wait = time.Duration(m.IntN(100)) * time.Millisecond
		}
		select {
		case <-died:
			m.inside++
			kill()
			return "killed"
		case err := <-idle:
			require.NoError(m, err)
			if m.goesOn(q) { // a dead letter was redriven at the same moment
				go func() { idle <- q.WaitIdle(idleCtx) }()
				continue
			}
			idle <- nil
			m.end()
			return ""
		case <-time.After(wait):
		}
		if time.Now().After(deadline) {
			for name, i := range m.tasks(q) {
				m.say("%s: %v attempts %d crashes %d suspect %t queue %s", name, i.State, i.Attempts, i.Crashes, i.Suspect, i.Queue)
			}
			m.Fatalf("it does not end: %v\n%s", m.opts.SuspectFor, strings.Join(m.said, "\n"))
		}
		switch meddled++; {
		case meddled >= 4 || m.ends >= 6:
			for _, name := range mixQueues {
				require.NoError(m, q.Resume(m.Context(), name))
			}
			for name, info := range m.tasks(q) {
				if info.State == codeq.Dead && info.Group != "" { // it may hold the turn
					m.isPoison(name, info)
					require.NoError(m, q.Forget(m.Context(), info.ID))
					m.purged[name] = true
				}
			}
		case m.oneIn(8):
			m.ends++
			m.outside++
			kill()
			return "killed"
		case m.oneIn(10):
			m.ends++
			m.say("closed")
			m.end()
			return "closed"
		case m.oneIn(10):
			m.ends++
			if m.disk.RemoveAll("copy") == nil && q.Checkpoint(m.Context(), "copy", codeq.CheckpointOptions{Copy: m.oneIn(2)}) == nil {
				m.end()
				require.NoError(m, m.disk.RemoveAll("q"))
				require.NoError(m, m.disk.Rename("copy", "q"))
				return "copied"
			}
		default:
			m.meddle(q)
		}
	}
}

// goesOn reports whether a task has not ended.
func (m *suspectMix) goesOn(q *codeq.Queue) bool {
	for _, info := range m.tasks(q) {
		if info.State != codeq.Dead && info.State != codeq.Done && info.State != codeq.Canceled {
			return true
		}
	}
	return false
}

// isPoison requires that a task has killed the process as often as it may.
func (m *suspectMix) isPoison(name string, info *codeq.TaskInfo) {
	_, poison := m.poison[name]
	if !poison || info.State != codeq.Dead || info.LastError != "the process died" || info.Attempts != info.MaxAttempts && info.Crashes != 10*info.MaxAttempts {
		m.Fatalf("%s is %v after %d of %d attempts, %d crashes: %s\n%s", name, info.State, info.Attempts, info.MaxAttempts, info.Crashes, info.LastError, strings.Join(m.said, "\n"))
	}
}

// meddle makes a change to a task or a queue.
func (m *suspectMix) meddle(q *codeq.Queue) {
	all := m.tasks(q)
	var names []string
	for name := range all {
		names = append(names, name)
	}
	slices.Sort(names)
	name := pick(m, names...)
	info, ctx := all[name], m.Context()
	_, poison := m.poison[name]
	queue := pick(m, mixQueues...)
	switch m.IntN(7) {
	case 0:
		if !poison && q.Cancel(ctx, info.ID) == nil {
			m.canceled[name] = true
			m.say("canceled %s", name)
		}
	case 1:
		_ = q.SetPriority(ctx, info.ID, m.IntN(3)) // it may not wait
	case 2:
		if q.SetRunAt(ctx, info.ID, time.Now().Add(time.Duration(m.IntN(200)-50)*time.Millisecond)) == nil {
			m.say("set RunAt of %s", name)
		}
	case 3:
		require.NoError(m, q.Pause(ctx, queue))
	case 4:
		require.NoError(m, q.Resume(ctx, queue))
	case 5:
		m.configure(q, queue)
	case 6:
		if !poison || info.State != codeq.Dead {
			return
		}
		if m.isPoison(name, info); m.oneIn(2) {
			require.NoError(m, q.Forget(ctx, info.ID))
			m.purged[name] = true
			m.say("purged %s", name)
		} else if !m.redriven[name] && q.RedriveDead(ctx, info.ID) == nil {
			m.redriven[name] = true
			m.bound += info.MaxAttempts
			m.say("redriven %s", name)
		}
	}
}

// TestSuspectsMix: among all kinds of tasks, queues and processes, a crash has the price that the
// rule says. Tasks that kill their process are dead after MaxAttempts and some more starts, and no
// other task is dead.
func TestSuspectsMix(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	seed, kills, most := testkit.Seed(), 0, 0
	for n := range uint64(testkit.Sized(15, 2000)) {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := &suspectMix{T: t, Rand: rand.New(rand.NewPCG(seed, n)), end: func() {}}
				t.Logf("-seed %d", seed)
				defer func() { m.end() }() // if it has failed
				m.begin()
				shards := m.opts.Shards
				end := "closed"
				for end != "" {
					before := m.left(m.disk, "q")
					if m.oneIn(6) {
						shards = 1 + m.IntN(4)
						m.say("moved to %d shards", shards)
						moved(t, m.disk, "q", "new", shards)
						require.NoError(t, m.disk.RemoveAll("q"))
						require.NoError(t, m.disk.Rename("new", "q"))
					}
					q := m.open("q", shards)
					synctest.Wait()
					m.pays(before, m.tasks(q), end == "killed")
					end = m.live(q)
					require.LessOrEqual(t, m.inside, 12*m.bound+12, strings.Join(m.said, "\n"))
				}
				for name, info := range m.left(m.disk, "q") {
					_, poison := m.poison[name]
					switch {
					case m.canceled[name], len(info.After) > 0 && info.State == codeq.Canceled:
						require.Equal(t, codeq.Canceled, info.State, name)
					case poison:
						m.isPoison(name, info)
					case m.fast && info.State == codeq.Dead: // SuspectFor must be longer than the time to kill the process
					default:
						require.Equal(t, codeq.Done, info.State, "%s: %+v\n%s", name, info, strings.Join(m.said, "\n"))
					}
				}
				if !m.fast { // the order of suspects is random: few kills are needed, mostly
					kills += m.inside
					most += 2*m.bound + 12
				}
				t.Logf("SuspectFor %v: %d kills from inside, %d from outside, bound %d", m.opts.SuspectFor, m.inside, m.outside, m.bound)
			})
		})
	}
	require.LessOrEqual(t, kills, most)
}

// abandonedRun opens the queue on disk, starts its tasks by Run, and returns the disk as it is when
// the process ends at that moment.
func abandonedRun(t *testing.T, disk *crashfs.Disk, shards int) (*crashfs.Disk, []handlerCall) {
	t.Helper()
	var crashed *crashfs.Disk
	calls := newCallRecorder()
	t.Run("process", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			q := queuetest.OpenForRun(t, *queuetest.OnDisk(disk, &codeq.Options{Shards: shards, Durability: codeq.DurabilityDisk, LeaseFor: time.Hour}))
			var m codeq.Mux
			codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
				calls.add(j.Lease)
				return untilCancelled(ctx, j)
			})
			startRun(t, q, &m, codeq.RunOptions{Concurrency: 8, Grace: -1})
			time.Sleep(time.Minute) // heartbeats renew leases, which no disk shows
			synctest.Wait()
			crashed = disk.CrashClone(vfs.CrashCloneCfg{})
		})
	})
	return crashed, calls.all()
}

// TestAbandonedRun: if the process of a Run is gone, its leases end at the next Open, one after the
// other, and no attempt counts.
func TestAbandonedRun(t *testing.T) {
	for _, shards := range []int{1, 3} {
		disk := crashfs.New()
		opts := *queuetest.OnDisk(disk, &codeq.Options{Shards: shards, Durability: codeq.DurabilityDisk})
		var ids []codeq.ID
		synctest.Test(t, func(t *testing.T) {
			q := queuetest.OpenForRun(t, opts)
			ids = queuetest.Produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a"}}, 5)...)
			// A lease of Claim survives its process, for comparison.
			id := queuetest.Produce(t, q, codeq.Task{Queue: "claimed"})[0]
			l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"claimed"}, LeaseFor: 24 * time.Hour})
			require.NoError(t, err)
			require.Equal(t, id, l.ID)
		})
		crashed, calls := abandonedRun(t, disk, shards)
		require.Len(t, calls, 5)
		synctest.Test(t, func(t *testing.T) {
			inspect.Options(&opts).FS = crashed
			q := queuetest.OpenForRun(t, opts)
			start := time.Now()
			var again []codeq.ID
			for range ids {
				l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
				require.NoError(t, err)
				require.Equal(t, 1, l.Attempt)
				require.Equal(t, "the process died", l.LastError)
				again = append(again, l.ID)
				require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
			}
			require.Zero(t, time.Since(start), "nothing but the others delays them")
			require.ElementsMatch(t, ids, again)
			require.Equal(t, codeq.Counts{Leased: 1}, queuetest.CountsOf(t, q, "claimed"))
			require.NoError(t, queuetest.CheckAll(q))
		})
	}
}

// TestCrashIsTold: the tasks, the process and the log report once which tasks were at work in a
// crash, even if a tool has opened the queue in between.
func TestCrashIsTold(t *testing.T) {
	disk := crashfs.New()
	var ids []codeq.ID
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, *queuetest.OnDisk(disk, &codeq.Options{Shards: 2}))
		ids = queuetest.Produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a"}}, 5)...)
	})
	disk, calls := abandonedRun(t, disk, 2)
	require.Len(t, calls, 5)
	synctest.Test(t, func(t *testing.T) {
		q, err := codeq.Open("q", queuetest.OnDisk(disk, &codeq.Options{Tool: true}))
		require.NoError(t, err)
		require.Equal(t, codeq.Counts{Leased: 5}, queuetest.CountsOf(t, q, "a"))
		require.NoError(t, q.Close())
	})
	for life := range 2 {
		synctest.Test(t, func(t *testing.T) {
			var log bytes.Buffer
			q := queuetest.OpenForRun(t, *queuetest.OnDisk(disk, &codeq.Options{Shards: 2, Logger: slog.New(slog.NewTextHandler(&log, nil))}))
			synctest.Wait()
			require.Equal(t, codeq.Counts{Blocked: 5}, queuetest.CountsOf(t, q, "a"))
			for _, id := range ids {
				info := queuetest.InfoOf(t, q, id)
				require.True(t, info.Suspect)
				require.Equal(t, 1, info.Crashes)
				require.Zero(t, info.Attempts)
				require.Equal(t, "the process died", info.History[0].Error)
			}
			p, err := q.ProcessInfo(t.Context())
			require.NoError(t, err)
			require.NoError(t, q.Close())
			if life == 0 {
				require.EqualValues(t, 5, p.Crashed)
				require.Contains(t, log.String(), `msg="tasks were at work when the process died" tasks=5 suspects=0`)
			} else {
				require.Zero(t, p.Crashed)
				require.NotContains(t, log.String(), "died")
			}
		})
	}
}

// TestNoCrash: Close or a copy of any kind, made while tasks are at work, makes no suspects and is
// not reported as a crash. It counts an attempt only if the Timeout of the task had passed.
func TestNoCrash(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		disk := crashfs.New()
		q := queuetest.OpenForRun(t, *queuetest.OnDisk(disk, &codeq.Options{Shards: 2}))
		queuetest.Produce(t, q, codeq.Task{Queue: "run", MaxAttempts: 1}, codeq.Task{Queue: "claim", MaxAttempts: 1},
			codeq.Task{Queue: "overdue", MaxAttempts: 2, Timeout: time.Second})
		_, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"claim"}, Local: true})
		require.NoError(t, err)
		var m codeq.Mux
		codeq.Handle(&m, "run", untilCancelled)
		end := make(chan struct{})
		codeq.Handle(&m, "overdue", func(context.Context, *codeq.Job[[]byte]) error { <-end; return nil })
		run := startRun(t, q, &m, codeq.RunOptions{Grace: -1, Concurrency: 2})
		time.Sleep(2 * time.Second)
		require.NoError(t, q.Checkpoint(t.Context(), "links"))
		require.NoError(t, q.Checkpoint(t.Context(), "files", codeq.CheckpointOptions{Copy: true}))
		close(end)
		synctest.Wait()
		require.NoError(t, run.End(errBubbleOver))
		require.NoError(t, q.Close())
		moved(t, disk, "links", "moved", 3)
		for dir, attempts := range map[string]map[string]int{
			"q":     {"run": 0, "claim": 0},
			"links": {"run": 0, "claim": 0, "overdue": 1}, "files": {"run": 0, "claim": 0, "overdue": 1}, "moved": {"run": 0, "claim": 0, "overdue": 1},
		} {
			var log bytes.Buffer
			q, err := codeq.Open(dir, queuetest.OnDisk(disk, &codeq.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}))
			require.NoError(t, err)
			synctest.Wait()
			got := make(map[string]int)
			for info, err := range q.List(t.Context(), codeq.ListOptions{State: codeq.Ready}) {
				require.NoError(t, err)
				require.False(t, info.Suspect)
				require.Zero(t, info.Crashes)
				got[info.Queue] = info.Attempts
			}
			require.Equal(t, attempts, got, dir)
			require.NoError(t, q.Close())
			require.NotContains(t, log.String(), "died")
		}
	})
}

// moved exports a queue, and imports it into another directory with that number of shards.
func moved(t *testing.T, disk *crashfs.Disk, from, to string, shards int) {
	t.Helper()
	var lines bytes.Buffer
	_, err := offline.Export(t.Context(), disk, from, true, &lines, nil)
	require.NoError(t, err)
	_, err = offline.Import(t.Context(), disk, to, &lines, offline.ImportConfig{Shards: shards})
	require.NoError(t, err)
}

// TestCopyOfSuspect: if a suspect is alone at work and the process dies, the suspect loses an
// attempt, even if the queue is exported first or a tool copies it. In a copy of the living queue
// the task stays a suspect, and loses nothing.
func TestCopyOfSuspect(t *testing.T) {
	t.Parallel()
	disk := crashfs.New()
	synctest.Test(t, func(t *testing.T) {
		queuetest.Produce(t, queuetest.OpenForRun(t, *queuetest.OnDisk(disk, &codeq.Options{})), codeq.Task{Queue: "a", MaxAttempts: 1})
	})
	disk, _ = abandonedRun(t, disk, 1)
	killed := make(map[string]*crashfs.Disk)
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, *queuetest.OnDisk(disk, &codeq.Options{}))
		var m codeq.Mux
		codeq.Handle(&m, "a", untilCancelled)
		startRun(t, q, &m, codeq.RunOptions{Grace: -1})
		time.Sleep(time.Second)
		require.EqualValues(t, 1, queuetest.CountsOf(t, q, "a").Leased)
		for _, dir := range []string{"q", "moved", "of the killed"} {
			killed[dir] = disk.Clone()
		}
		require.NoError(t, q.Checkpoint(t.Context(), "copy"))
		killed["copy"] = disk.Clone()
		killed["moved copy"] = disk.Clone()
	})
	synctest.Test(t, func(t *testing.T) {
		moved(t, killed["moved"], "q", "moved", 2)
		moved(t, killed["moved copy"], "copy", "moved copy", 2)
		tool, err := codeq.Open("q", queuetest.OnDisk(killed["of the killed"], &codeq.Options{Tool: true}))
		require.NoError(t, err)
		require.NoError(t, tool.Checkpoint(t.Context(), "of the killed"))
		require.NoError(t, tool.Close())
		for dir, disk := range killed {
			q, err := codeq.Open(dir, queuetest.OnDisk(disk, &codeq.Options{}))
			require.NoError(t, err)
			synctest.Wait()
			want := codeq.Dead
			if strings.Contains(dir, "copy") {
				want = codeq.Blocked
			}
			for info, err := range q.List(t.Context(), codeq.ListOptions{State: want}) {
				require.NoError(t, err)
				require.Equal(t, want == codeq.Blocked, info.Suspect)
				require.Equal(t, want == codeq.Dead, info.Attempts == 1)
				require.Equal(t, 1, info.Crashes)
				want = 0
			}
			require.Zero(t, want, "%s: %+v", dir, queuetest.CountsOf(t, q, "a"))
			require.NoError(t, q.Close())
		}
	})
}

// TestSuspectsStartBesideOthers: suspects at work delay other suspects, for SuspectFor, and no
// other tasks.
func TestSuspectsStartBesideOthers(t *testing.T) {
	disk := crashfs.New()
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, *queuetest.OnDisk(disk, &codeq.Options{Shards: 2}))
		queuetest.Produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a"}}, 7)...)
	})
	disk, _ = abandonedRun(t, disk, 2)
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, *queuetest.OnDisk(disk, &codeq.Options{Shards: 2, SuspectFor: time.Second}))
		var suspects, others atomic.Int32
		var m codeq.Mux
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			if string(j.Args) == "other" {
				others.Add(1)
				return nil
			}
			suspects.Add(1)
			return untilCancelled(ctx, j)
		})
		startRun(t, q, &m, codeq.RunOptions{Grace: -1, Concurrency: 16})
		for round, want := range []int32{1, 3, 7} {
			synctest.Wait()
			require.Equal(t, want, suspects.Load())
			queuetest.Produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a", Payload: []byte("other")}}, 4)...)
			synctest.Wait()
			require.EqualValues(t, 4*(round+1), others.Load())
			p, err := q.ProcessInfo(t.Context())
			require.NoError(t, err)
			require.Equal(t, 1<<round, p.Suspects)
			time.Sleep(time.Second)
		}
	})
}

// TestSuspectsStartBesideBacklog: each suspect starts in bounded time, although other shards and
// other queues of the same weight always have more work than there are workers.
func TestSuspectsStartBesideBacklog(t *testing.T) {
	disk := crashfs.New()
	const suspects = 8
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, *queuetest.OnDisk(disk, &codeq.Options{Shards: 4}))
		for i := range suspects { // a LimitKey has a shard
			queuetest.Produce(t, q, codeq.Task{Queue: "a", LimitKey: fmt.Sprint("key ", i)})
		}
	})
	crashed, calls := abandonedRun(t, disk, 4)
	require.Len(t, calls, suspects)
	for _, backlog := range []string{"a", "b"} {
		disk := crashed.CrashClone(vfs.CrashCloneCfg{})
		synctest.Test(t, func(t *testing.T) {
			q := queuetest.OpenForRun(t, *queuetest.OnDisk(disk, &codeq.Options{Shards: 4, SuspectFor: time.Second}))
			var started, others atomic.Int32
			all := make(chan struct{})
			var m codeq.Mux
			for _, queue := range []string{"a", "b"} {
				codeq.Handle(&m, queue, func(_ context.Context, j *codeq.Job[[]byte]) error {
					if string(j.Args) == "other" {
						others.Add(1)
						time.Sleep(10 * time.Millisecond)
					} else if started.Add(1) == suspects {
						close(all)
					}
					return nil
				})
			}
			feed := func() {
				for range 50 {
					queuetest.Produce(t, q, codeq.Task{Queue: backlog, LimitKey: "key 0", Payload: []byte("other")})
				}
			}
			feed()
			begun := time.Now()
			startRun(t, q, &m, codeq.RunOptions{Grace: -1, Concurrency: 2})
			for tick := time.NewTicker(100 * time.Millisecond); ; {
				select {
				case <-tick.C:
					require.Less(t, time.Since(begun), 20*time.Second, "%d of %d suspects have started", started.Load(), suspects)
					if queuetest.CountsOf(t, q, backlog).Ready < 30 {
						feed()
					}
					continue
				case <-all:
				}
				tick.Stop()
				break
			}
			require.Greater(t, others.Load(), int32(suspects))
			t.Logf("queue %s: all after %v, beside %d others", backlog, time.Since(begun), others.Load())
		})
	}
}
