package killtest

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testkit"
)

// The tests of suspects run a child that works on a queue until it is idle, or until a task kills
// it.

// suspectChildConfig is the configuration of a child.
type suspectChildConfig struct {
	Dir         string
	Concurrency int
	Good        time.Duration // duration of a good task; less than 0: until the kill of the child
	Poison      time.Duration // time until a poisonous task kills the process
	SuspectFor  time.Duration // an option; 0: the default
	MaxAttempts int           // likewise

	Peers   []codeq.Peer // of a cluster; none: a queue without a cluster
	Self    int          // of them
	Produce []codeq.Task // the child produces these tasks, and does not work
}

func (c *suspectChildConfig) options() *codeq.Options {
	o := suspectOptions()
	o.SuspectFor, o.MaxAttempts = c.SuspectFor, c.MaxAttempts
	if len(c.Peers) > 0 {
		self := c.Peers[c.Self]
		o.Cluster = &codeq.Cluster{
			Node: self.Node, Listen: self.Address, Peers: c.Peers,
			HeartbeatTimeout: 500 * time.Millisecond, ElectionTimeout: 500 * time.Millisecond,
		}
	}
	return o
}

func suspectOptions() *codeq.Options {
	return &codeq.Options{Shards: 4, Durability: codeq.DurabilityProcess}
}

// suspectChild prints a line for each task that begins.
func suspectChild(c suspectChildConfig) error {
	q, err := codeq.Open(c.Dir, c.options())
	if err != nil {
		return err
	}
	if len(c.Peers) > 0 {
		return suspectNode(q, c)
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- q.Run(ctx, suspectMux(c), &codeq.RunOptions{Concurrency: c.Concurrency}) }()
	if err := q.WaitIdle(ctx); err != nil {
		return err
	}
	stop()
	if err := <-ended; err != nil {
		return err
	}
	return q.Close()
}

// suspectNode works on the queue of a cluster until its kill. When no task is left, it prints a
// line with all tasks.
func suspectNode(q *codeq.Queue, c suspectChildConfig) error {
	ctx := context.Background()
	if err := q.WaitReady(ctx); err != nil {
		return err
	}
	if c.Produce != nil {
		if _, err := q.ProduceBatch(ctx, c.Produce); err != nil {
			return err
		}
		fmt.Println("produced")
		select {}
	}
	go func() {
		for {
			if q.WaitIdle(ctx) == nil {
				if tasks, err := endedTasks(ctx, q); err == nil {
					b, _ := json.Marshal(tasks) // never fails
					fmt.Printf("%s\n", b)
					return
				}
			}
			time.Sleep(10 * time.Millisecond) // a leader has died
		}
	}()
	return q.Run(ctx, suspectMux(c), &codeq.RunOptions{Concurrency: c.Concurrency, LeaseFor: time.Second, Name: "worker"})
}

// endedTask is the printed form of a task that has ended.
type endedTask struct {
	Payload           string
	State             codeq.State
	Attempts, Crashes int
	Suspect           bool
	LastError         string
}

// endedTasks returns the tasks of a queue that have ended.
func endedTasks(ctx context.Context, q *codeq.Queue) (tasks []endedTask, err error) {
	for _, state := range []codeq.State{codeq.Dead, codeq.Done} {
		for info, err := range q.List(ctx, codeq.ListOptions{State: state}) {
			if err != nil {
				return nil, err
			}
			tasks = append(tasks, endedTask{string(info.Payload), info.State, info.Attempts, info.Crashes, info.Suspect, info.LastError})
		}
	}
	return tasks, nil
}

func suspectMux(c suspectChildConfig) *codeq.Mux {
	m := new(codeq.Mux)
	codeq.Handle(m, "work", func(ctx context.Context, l *codeq.Job[[]byte]) error {
		fmt.Println(string(l.Args))
		switch {
		case strings.HasPrefix(string(l.Args), "poison"):
			time.Sleep(c.Poison)
			self, err := os.FindProcess(os.Getpid())
			if err != nil {
				return err
			}
			return self.Kill()
		case c.Good < 0:
			<-ctx.Done()
			return ctx.Err()
		}
		time.Sleep(c.Good)
		return nil
	})
	return m
}

// startSuspectChild starts a child, and passes the lines that it prints.
func startSuspectChild(t *testing.T, c suspectChildConfig, each func(line string)) *child {
	t.Helper()
	return start(t, command(t, thisBuild(t), "suspect", c), func(out io.Reader) {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			each(lines.Text())
		}
	})
}

// runUntilIdle starts children until one ends by itself. It returns the number of children that
// their tasks have killed.
func runUntilIdle(t *testing.T, c suspectChildConfig) (crashes int) {
	t.Helper()
	for startSuspectChild(t, c, func(string) {}).wait() != nil {
		crashes++
		require.Less(t, crashes, 1000)
	}
	return crashes
}

// suspectTasks returns some good tasks, and then some poisonous ones.
func suspectTasks(poison, good int) (tasks []codeq.Task) {
	for i := range poison + good {
		kind := "good"
		if i >= good {
			kind = "poison"
		}
		tasks = append(tasks, codeq.Task{Queue: "work", Payload: fmt.Append(nil, kind, " ", i), Retention: codeq.Forever})
	}
	return tasks
}

// produceSuspects makes a queue with tasks.
func produceSuspects(t *testing.T, dir string, tasks []codeq.Task) {
	t.Helper()
	q, err := codeq.Open(dir, suspectOptions())
	require.NoError(t, err)
	for _, task := range tasks {
		_, err = q.Produce(t.Context(), task)
		require.NoError(t, err)
	}
	require.NoError(t, q.Close())
}

// checkSuspects is checkEnded for the tasks in a directory. It also checks that the directory is
// sound.
func checkSuspects(t *testing.T, dir string, poison, good, attempts int) (most int) {
	t.Helper()
	q, err := codeq.Open(dir, suspectOptions())
	require.NoError(t, err)
	tasks, err := endedTasks(t.Context(), q)
	require.NoError(t, err)
	require.NoError(t, q.Close())
	report, err := codeq.Verify(dir, nil)
	require.NoError(t, err)
	require.True(t, report.OK(), "%v", report.Problems)
	return checkEnded(t, tasks, poison, good, attempts)
}

// checkEnded checks that only the poisonous tasks are dead after their attempts. It returns the
// largest number of crashes of a good task.
func checkEnded(t *testing.T, tasks []endedTask, poison, good, attempts int) (most int) {
	t.Helper()
	dead := 0
	for _, e := range tasks {
		if e.State == codeq.Done {
			require.True(t, strings.HasPrefix(e.Payload, "good"), "%+v", e)
			most = max(most, e.Crashes)
			continue
		}
		require.True(t, strings.HasPrefix(e.Payload, "poison"), "%+v", e)
		require.Equal(t, "the process died", e.LastError)
		require.Equal(t, attempts, e.Attempts)
		require.False(t, e.Suspect)
		dead++
	}
	require.Equal(t, poison, dead)
	require.Len(t, tasks, poison+good)
	return most
}

// TestPoisonousTask: a task that kills the process does not cause the death of its neighbours, for
// any duration of these tasks: only the poisonous task is dead, after MaxAttempts and few starts
// more.
func TestPoisonousTask(t *testing.T) {
	t.Parallel()
	const brief = 20 * time.Millisecond
	for _, c := range []struct {
		name             string
		poison, attempts int
		crashes          int // at most
		rounds           int
		oldest           bool // the good tasks are older: their shards and queues come first
		child            suspectChildConfig
	}{
		{"beside others", 1, 25, 25 + 5, testkit.Sized(1, 8), false, suspectChildConfig{Good: brief}},
		{"after others", 1, 25, 25 + 5, testkit.Sized(0, 8), false, suspectChildConfig{Good: time.Millisecond, Poison: 50 * time.Millisecond}},
		{"two of them", 2, 25, 4*25 + 10, testkit.Sized(1, 8), false, suspectChildConfig{Good: brief}},
		// The good tasks run for longer than the process needs to start all suspects.
		{"among long ones", 1, 5, 5 + 25, testkit.Sized(1, 4), true, suspectChildConfig{Good: 2 * time.Second, SuspectFor: brief, MaxAttempts: 5}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if c.rounds == 0 {
				testkit.OnlyLong(t, "25 processes more")
			}
			random := testkit.Seeded(t)
			for range c.rounds {
				tasks, good := suspectTasks(c.poison, 8-c.poison), 8-c.poison
				if !c.oldest {
					random.Shuffle(len(tasks), func(i, j int) { tasks[i], tasks[j] = tasks[j], tasks[i] })
				}
				c.child.Dir, c.child.Concurrency = t.TempDir(), len(tasks)
				produceSuspects(t, c.child.Dir, tasks)
				n := runUntilIdle(t, c.child)
				t.Logf("%d crashes, at most %d with a good task at work", n, checkSuspects(t, c.child.Dir, c.poison, good, c.attempts))
				require.LessOrEqual(t, n, c.crashes)
			}
		})
	}
}

// TestPoisonousTasksInCluster: three nodes work on a queue, and lead its shards. Only the tasks
// that kill the process of their worker are dead, after MaxAttempts and some starts more. This
// holds although the test kills nodes as well.
func TestPoisonousTasksInCluster(t *testing.T) {
	t.Parallel()
	poison, good, maxAttempts := 1, 6, testkit.Sized(2, 6)
	random := testkit.Seeded(t)
	peers := threePeers(t, random.IntN)
	type line struct {
		node int
		text string // "": the node has ended
	}
	lines := make(chan line)
	nodes, dir := make([]*child, len(peers)), t.TempDir()
	start := func(i int, produce []codeq.Task) {
		c := startSuspectChild(t, suspectChildConfig{
			Dir: filepath.Join(dir, peers[i].Node), Concurrency: 4, Good: 200 * time.Millisecond, MaxAttempts: maxAttempts,
			Peers: peers, Self: i, Produce: produce,
		}, func(text string) { lines <- line{i, text} })
		nodes[i] = c
		go func() {
			_ = c.wait() // it is killed
			lines <- line{i, ""}
		}()
	}
	kill := func() {
		for _, c := range nodes {
			_ = c.Process.Kill() // or it has died
		}
		for range nodes {
			for l := range lines {
				if l.text == "" {
					break
				}
			}
		}
	}
	tasks := suspectTasks(poison, good)
	for i := range nodes {
		start(i, tasks[i*len(tasks)/len(nodes):(i+1)*len(tasks)/len(nodes)])
	}
	for produced := 0; produced < len(nodes); {
		l := <-lines
		require.NotEmpty(t, l.text, "a node has ended")
		if l.text == "produced" {
			produced++
		}
	}
	kill()
	for i := range nodes {
		start(i, nil)
	}
	crashes, killed := 0, false
	var ended []endedTask
	for ended == nil {
		switch l := <-lines; {
		case l.text == "":
			crashes++
			require.Less(t, crashes, 5*maxAttempts+15)
			start(l.node, nil)
		case strings.HasPrefix(l.text, "["):
			require.NoError(t, json.Unmarshal([]byte(l.text), &ended))
		case strings.HasPrefix(l.text, "good") && !killed:
			killed = true
			_ = nodes[random.IntN(len(nodes))].Process.Kill() // or it has died
		}
	}
	kill()
	t.Logf("%d crashes: %+v", crashes, ended)
	checkEnded(t, ended, poison, good, maxAttempts)
}

// TestKilledInnocents: a kill -9 of a process with many running tasks costs rounds, each with twice
// as many tasks, and no attempt. This also holds for another kill during the rounds.
func TestKilledInnocents(t *testing.T) {
	t.Parallel()
	const innocents = 1000
	for _, again := range []bool{false, true} {
		t.Run(fmt.Sprint("again ", again), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			produceSuspects(t, dir, suspectTasks(0, innocents))
			killAfter := func(tasks int) {
				began := make(chan string, innocents)
				c := startSuspectChild(t, suspectChildConfig{Dir: dir, Concurrency: innocents, Good: -1}, func(line string) { began <- line })
				for range tasks {
					select {
					case <-began:
					case <-c.read:
						require.FailNow(t, "the child has ended")
					}
				}
				c.kill()
			}
			killAfter(innocents)
			if again { // the first suspect runs, and clears the others
				killAfter(1)
			}
			q, err := codeq.Open(dir, suspectOptions())
			require.NoError(t, err)
			begun, end := make(chan struct{}, innocents), make(chan struct{})
			m := new(codeq.Mux)
			codeq.Handle(m, "work", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
				begun <- struct{}{}
				<-end
				return nil
			})
			ctx, stop := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- q.Run(ctx, m, &codeq.RunOptions{Concurrency: innocents}) }()
			rounds := 0
			for left, width := innocents, 1; left > 0 && !again; width *= 2 {
				n := min(width, left)
				for range n {
					<-begun
				}
				select {
				case <-begun:
					t.Fatalf("more than %d suspects begin together", n)
				case <-time.After(20 * time.Millisecond):
				}
				for range n {
					end <- struct{}{}
				}
				left -= n
				rounds++
			}
			close(end)
			require.NoError(t, q.WaitIdle(t.Context()))
			stop()
			require.NoError(t, <-ended)
			attempts := 0
			for info, err := range q.List(t.Context(), codeq.ListOptions{State: codeq.Done}) {
				require.NoError(t, err)
				attempts = max(attempts, info.Attempts)
			}
			require.NoError(t, q.Close())
			checkSuspects(t, dir, 0, innocents, 25)
			if !again {
				require.Equal(t, 10, rounds)
				require.Equal(t, 1, attempts, "the one that has completed it")
			}
			t.Logf("%d rounds", rounds)
		})
	}
}
