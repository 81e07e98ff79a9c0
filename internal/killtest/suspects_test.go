package killtest

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testkit"
)

// The tests of suspects run this test binary again as a child that works on a queue until it is
// idle, or until a task kills it.
const suspectChildEnv = "CODEQ_SUSPECT_CHILD"

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
func suspectChild() error {
	var c suspectChildConfig
	if err := json.Unmarshal([]byte(os.Getenv(suspectChildEnv)), &c); err != nil {
		return err
	}
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
// line for each task.
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
			if q.WaitIdle(ctx) == nil && printEnded(ctx, q) == nil {
				fmt.Println("end")
				return
			}
			time.Sleep(10 * time.Millisecond) // a leader has died
		}
	}()
	return q.Run(ctx, suspectMux(c), &codeq.RunOptions{Concurrency: c.Concurrency, LeaseFor: time.Second, Name: "worker"})
}

// endedTask is the printed form of a task that has ended.
type endedTask struct {
	Payload           []byte
	State             codeq.State
	Attempts, Crashes int
	LastError         string
}

func printEnded(ctx context.Context, q *codeq.Queue) error {
	for _, state := range []codeq.State{codeq.Dead, codeq.Done} {
		for info, err := range q.List(ctx, codeq.ListOptions{State: state}) {
			if err != nil {
				return err
			}
			b, err := json.Marshal(endedTask{info.Payload, info.State, info.Attempts, info.Crashes, info.LastError})
			if err != nil {
				return err
			}
			fmt.Printf("%s\n", b)
		}
	}
	return nil
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
func startSuspectChild(t *testing.T, c suspectChildConfig) (cmd *exec.Cmd, lines *bufio.Scanner) {
	t.Helper()
	conf, err := json.Marshal(c)
	require.NoError(t, err)
	cmd = exec.Command(thisBuild(t), "-test.run=^$")
	cmd.Env = append(os.Environ(), suspectChildEnv+"="+string(conf))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	return cmd, bufio.NewScanner(out)
}

// runUntilIdle starts children until one ends by itself. It returns the number of children that
// their tasks have killed.
func runUntilIdle(t *testing.T, c suspectChildConfig) (crashes int) {
	t.Helper()
	for {
		cmd, lines := startSuspectChild(t, c)
		for lines.Scan() {
		}
		if cmd.Wait() == nil {
			return crashes
		}
		crashes++
		require.Less(t, crashes, 1000)
	}
}

// produceSuspects makes a queue with some poisonous and some good tasks.
func produceSuspects(t *testing.T, dir string, poison, good int) {
	t.Helper()
	q, err := codeq.Open(dir, suspectOptions())
	require.NoError(t, err)
	var tasks []codeq.Task
	for i := range poison + good {
		kind := "good"
		if i < poison {
			kind = "poison"
		}
		tasks = append(tasks, codeq.Task{Queue: "work", Payload: fmt.Append(nil, kind, " ", i), Retention: codeq.Forever})
	}
	testkit.Seeded(t).Shuffle(len(tasks), func(i, j int) { tasks[i], tasks[j] = tasks[j], tasks[i] })
	_, err = q.ProduceBatch(t.Context(), tasks)
	require.NoError(t, err)
	require.NoError(t, q.Close())
}

// checkSuspects checks that only the poisonous tasks are dead after their attempts, and that the
// directory is sound. It returns the largest number of crashes of a good task.
func checkSuspects(t *testing.T, dir string, poison, good, attempts int) (most int) {
	t.Helper()
	q, err := codeq.Open(dir, suspectOptions())
	require.NoError(t, err)
	dead := 0
	for info, err := range q.List(t.Context(), codeq.ListOptions{State: codeq.Dead}) {
		require.NoError(t, err)
		require.True(t, strings.HasPrefix(string(info.Payload), "poison"), "%s died: %+v", info.Payload, info)
		require.Equal(t, attempts, info.Attempts)
		require.Equal(t, "the process died", info.LastError)
		require.False(t, info.Suspect)
		dead++
	}
	require.Equal(t, poison, dead)
	done := 0
	for info, err := range q.List(t.Context(), codeq.ListOptions{State: codeq.Done}) {
		require.NoError(t, err)
		require.True(t, strings.HasPrefix(string(info.Payload), "good"))
		most = max(most, info.Crashes)
		done++
	}
	require.Equal(t, good, done)
	require.NoError(t, q.Close())
	report, err := codeq.Verify(dir, nil)
	require.NoError(t, err)
	require.True(t, report.OK(), "%v", report.Problems)
	return most
}

// TestPoisonousTask: a task that kills the process does not cause the death of its neighbours, for
// any duration of these tasks: only the poisonous task is dead, after MaxAttempts and few starts
// more.
func TestPoisonousTask(t *testing.T) {
	t.Parallel()
	crashes := 0
	for round := 0; crashes < testkit.Sized(25, 400); round++ {
		dir := t.TempDir()
		produceSuspects(t, dir, 1, 7)
		c := suspectChildConfig{Dir: dir, Concurrency: 8, Good: 20 * time.Millisecond}
		if round%2 == 1 {
			c.Good, c.Poison = time.Millisecond, 50*time.Millisecond
		}
		n := runUntilIdle(t, c)
		most := checkSuspects(t, dir, 1, 7, 25)
		t.Logf("%d crashes, at most %d with a good task at work", n, most)
		require.LessOrEqual(t, n, 25+5)
		crashes += n
	}
}

// TestPoisonousTaskAmongLongOnes: good tasks that run for longer than the process needs to start
// all suspects do not die with a poisonous task. The good tasks are older than the poisonous one,
// and their shards and queues come first.
func TestPoisonousTaskAmongLongOnes(t *testing.T) {
	t.Parallel()
	const good, maxAttempts = 7, 5
	for range testkit.Sized(1, 4) {
		dir := t.TempDir()
		q, err := codeq.Open(dir, suspectOptions())
		require.NoError(t, err)
		for i := range good + 1 {
			kind := "good"
			if i == good {
				kind = "poison"
			}
			_, err = q.Produce(t.Context(), codeq.Task{Queue: "work", Payload: fmt.Append(nil, kind, " ", i), Retention: codeq.Forever})
			require.NoError(t, err)
		}
		require.NoError(t, q.Close())
		n := runUntilIdle(t, suspectChildConfig{
			Dir: dir, Concurrency: good + 1, Good: 2 * time.Second, SuspectFor: 20 * time.Millisecond, MaxAttempts: maxAttempts,
		})
		most := checkSuspects(t, dir, 1, good, maxAttempts)
		t.Logf("%d crashes, at most %d with a good task at work", n, most)
		require.LessOrEqual(t, n, maxAttempts+25)
	}
}

// TestPoisonousTasks: two poisonous tasks die, and the other tasks do not.
func TestPoisonousTasks(t *testing.T) {
	t.Parallel()
	for range testkit.Sized(1, 8) {
		dir := t.TempDir()
		produceSuspects(t, dir, 2, 6)
		n := runUntilIdle(t, suspectChildConfig{Dir: dir, Concurrency: 8, Good: 20 * time.Millisecond})
		t.Logf("%d crashes, at most %d with a good task at work", n, checkSuspects(t, dir, 2, 6, 25))
		require.LessOrEqual(t, n, 4*25+10)
	}
}

// TestPoisonousTasksInCluster: three nodes work on a queue, and lead its shards. Only the tasks
// that kill the process of their worker are dead, after MaxAttempts and some starts more. This
// holds although the test kills nodes as well.
func TestPoisonousTasksInCluster(t *testing.T) {
	t.Parallel()
	poison, good, maxAttempts := 1, 6, testkit.Sized(2, 6)
	random := testkit.Seeded(t)
	var peers []codeq.Peer
	first := testkit.FreePorts(t, random.IntN, 3)
	for i := range 3 {
		peers = append(peers, codeq.Peer{Node: fmt.Sprint("n", i), Address: fmt.Sprint("127.0.0.1:", first+i)})
	}
	type line struct {
		node int
		text string // "": the node has ended
	}
	lines := make(chan line)
	nodes, dir := make([]*exec.Cmd, len(peers)), t.TempDir()
	start := func(i int, produce []codeq.Task) {
		cmd, out := startSuspectChild(t, suspectChildConfig{
			Dir: filepath.Join(dir, peers[i].Node), Concurrency: 4, Good: 200 * time.Millisecond, MaxAttempts: maxAttempts,
			Peers: peers, Self: i, Produce: produce,
		})
		nodes[i] = cmd
		go func() {
			for out.Scan() {
				lines <- line{i, out.Text()}
			}
			_ = cmd.Wait() // it is killed
			lines <- line{i, ""}
		}()
	}
	kill := func() {
		for _, cmd := range nodes {
			_ = cmd.Process.Kill() // or it has died
		}
		for range nodes {
			for l := range lines {
				if l.text == "" {
					break
				}
			}
		}
	}
	var tasks []codeq.Task
	for i := range poison + good {
		kind := "good"
		if i < poison {
			kind = "poison"
		}
		tasks = append(tasks, codeq.Task{Queue: "work", Payload: fmt.Append(nil, kind, " ", i), Retention: codeq.Forever})
	}
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
	ended := make([][]endedTask, len(nodes))
	for settled := false; !settled; {
		switch l := <-lines; {
		case l.text == "":
			crashes++
			require.Less(t, crashes, 5*maxAttempts+15)
			ended[l.node] = nil
			start(l.node, nil)
		case l.text == "end":
			settled = true
			checkEnded(t, ended[l.node], poison, good, maxAttempts)
		case strings.HasPrefix(l.text, "{"):
			var e endedTask
			require.NoError(t, json.Unmarshal([]byte(l.text), &e))
			ended[l.node] = append(ended[l.node], e)
		case strings.HasPrefix(l.text, "good") && !killed:
			killed = true
			_ = nodes[random.IntN(len(nodes))].Process.Kill() // or it has died
		}
	}
	kill()
	t.Logf("%d crashes", crashes)
}

// checkEnded is checkSuspects for the output of nodes.
func checkEnded(t *testing.T, tasks []endedTask, poison, good, attempts int) {
	t.Helper()
	for _, e := range tasks {
		t.Logf("%s: %v after %d attempts and %d crashes", e.Payload, e.State, e.Attempts, e.Crashes)
		if e.State == codeq.Done {
			good--
			require.True(t, strings.HasPrefix(string(e.Payload), "good"))
			continue
		}
		poison--
		require.True(t, strings.HasPrefix(string(e.Payload), "poison"), "%s died", e.Payload)
		require.Equal(t, "the process died", e.LastError)
		require.Equal(t, attempts, e.Attempts)
	}
	require.Zero(t, poison)
	require.Zero(t, good)
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
			produceSuspects(t, dir, 0, innocents)
			cmd, lines := startSuspectChild(t, suspectChildConfig{Dir: dir, Concurrency: innocents, Good: -1})
			for range innocents {
				require.True(t, lines.Scan())
			}
			require.NoError(t, cmd.Process.Kill())
			require.Error(t, cmd.Wait())
			if again { // the first suspect runs, and clears the others
				cmd, lines := startSuspectChild(t, suspectChildConfig{Dir: dir, Concurrency: innocents, Good: -1})
				require.True(t, lines.Scan())
				require.NoError(t, cmd.Process.Kill())
				require.Error(t, cmd.Wait())
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
