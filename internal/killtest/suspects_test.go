package killtest

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
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

// suspectChildConfig is what a child works with.
type suspectChildConfig struct {
	Dir         string
	Concurrency int
	Good        time.Duration // how long a good task takes; less than 0: until the child is killed
	Poison      time.Duration // how long a poisonous task takes to kill the process
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
	q, err := codeq.Open(c.Dir, suspectOptions())
	if err != nil {
		return err
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

// runUntilIdle starts children until one ends by itself, and returns how many were killed from
// inside.
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

// checkSuspects makes sure that the poisonous tasks, and no other, are dead after 25 attempts, and
// that the directory is sound. It returns the most crashes of a good task.
func checkSuspects(t *testing.T, dir string, poison, good int) (most int) {
	t.Helper()
	q, err := codeq.Open(dir, suspectOptions())
	require.NoError(t, err)
	dead := 0
	for info, err := range q.List(t.Context(), codeq.ListOptions{State: codeq.Dead}) {
		require.NoError(t, err)
		require.True(t, strings.HasPrefix(string(info.Payload), "poison"), "%s died: %+v", info.Payload, info)
		require.Equal(t, 25, info.Attempts)
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

// TestPoisonousTask: a task that kills the process does not take its neighbours along, however long
// it takes for that, or they do: it alone is dead after MaxAttempts, and few starts more.
func TestPoisonousTask(t *testing.T) {
	t.Parallel()
	crashes := 0
	for round := 0; crashes < testkit.Sized(25, 200, 400); round++ {
		dir := t.TempDir()
		produceSuspects(t, dir, 1, 7)
		c := suspectChildConfig{Dir: dir, Concurrency: 8, Good: 20 * time.Millisecond}
		if round%2 == 1 {
			c.Good, c.Poison = time.Millisecond, 50*time.Millisecond
		}
		n := runUntilIdle(t, c)
		most := checkSuspects(t, dir, 1, 7)
		t.Logf("%d crashes, at most %d with a good task at work", n, most)
		require.LessOrEqual(t, n, 25+5)
		crashes += n
	}
}

// TestPoisonousTasks: two such tasks die, and the others do not.
func TestPoisonousTasks(t *testing.T) {
	t.Parallel()
	for range testkit.Sized(1, 4, 8) {
		dir := t.TempDir()
		produceSuspects(t, dir, 2, 6)
		n := runUntilIdle(t, suspectChildConfig{Dir: dir, Concurrency: 8, Good: 20 * time.Millisecond})
		t.Logf("%d crashes, at most %d with a good task at work", n, checkSuspects(t, dir, 2, 6))
		require.LessOrEqual(t, n, 4*25+10)
	}
}

// TestKilledInnocents: a kill -9 of a process with many tasks at work costs rounds, each of twice
// as many tasks, and no attempt, also if the process is killed again amid the rounds.
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
			if again { // the first suspect is at work, and clears the others
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
			checkSuspects(t, dir, 0, innocents)
			if !again {
				require.Equal(t, 10, rounds)
				require.Equal(t, 1, attempts, "the one that has completed it")
			}
			t.Logf("%d rounds", rounds)
		})
	}
}
