//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

var seed = flag.Uint64("seed", 0, "of the moments at which processes are killed; 0: the clock's")

// childEnv makes the test binary the command itself, with a log of its steps on standard error.
const childEnv = "TREESUM_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) == "" {
		os.Exit(m.Run())
	}
	teller := &teller{told: make(map[string]bool)}
	onWalk = func(t *tree, name string) { teller.tell(t, "walk", name) }
	onHash = func(t *tree, name string) { teller.tell(t, "hash", name) }
	main()
}

// teller writes lines: "walk NAME" and "hash NAME" before a read, and "done NAME" once a digest is
// stored.
type teller struct {
	mu   sync.Mutex
	told map[string]bool // done
}

func (l *teller) tell(t *tree, event, name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var done []string
	for task, err := range t.queue.List(context.Background(), codeq.ListOptions{Queue: hashQueue, State: codeq.Done}) {
		if err != nil {
			return // the command itself reports it
		}
		if file := string(task.Payload); !l.told[file] {
			done = append(done, file)
		}
	}
	// List may be ahead of the disk by the group that is being committed; Stats returns after that
	// group.
	if _, _, err := t.state(); err != nil {
		return
	}
	for _, file := range done {
		l.told[file] = true
		fmt.Fprintf(os.Stderr, "done %q\n", file)
	}
	fmt.Fprintf(os.Stderr, "%s %q\n", event, name)
}

// child runs the command in another process, and kills it when it logs for the killAt-th time that
// it is about to read something; 0: never. heard gets the logged lines; rest is everything else
// that it writes to standard error.
func child(t *testing.T, args []string, killAt int, heard func(event, name string)) (stdout, rest string, killed bool) {
	t.Helper()
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), childEnv+"=1")
	var out bytes.Buffer
	cmd.Stdout = &out
	pipe, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(pipe)
	events := 0
	for lines.Scan() {
		event, quoted, _ := strings.Cut(lines.Text(), " ")
		name, err := strconv.Unquote(quoted)
		if err != nil {
			rest += lines.Text() + "\n"
			continue
		}
		heard(event, name)
		if event != "done" {
			if events++; events == killAt {
				killed = true
				_ = cmd.Process.Kill() // unless it has just ended
			}
		}
	}
	require.NoError(t, lines.Err())
	if err := cmd.Wait(); err == nil {
		killed = false
	} else if !killed {
		require.NoError(t, err, rest)
	}
	return out.String(), rest, killed
}

func TestKill9(t *testing.T) {
	t.Parallel()
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 0))
	const files = 400
	root, queue := filepath.Join(t.TempDir(), "tree"), filepath.Join(t.TempDir(), "queue")
	for i := range files {
		path := filepath.Join(root, fmt.Sprint(i%5), fmt.Sprint(i%11), fmt.Sprint(i))
		write(t, path, strings.Repeat(fmt.Sprint(i), i))
	}
	args := []string{"-workers", "4", "-keep", "-queue", queue, root}

	done := make(map[string]int) // the run that reported it done
	reads, kills := make(map[string]int), 0
	for run := 1; ; run++ {
		stdout, rest, killed := child(t, args, 1+rng.IntN(files/6), func(event, name string) {
			switch event {
			case "done":
				if done[name] == 0 {
					done[name] = run
				}
			case "hash":
				reads[name]++
				if done[name] > 0 {
					t.Errorf("run %d reads %s, which was done in run %d", run, name, done[name])
				}
			}
		})
		require.Empty(t, rest)
		require.False(t, t.Failed())
		if killed {
			kills++
			continue
		}
		require.Equal(t, expected(t, root), stdout)
		break
	}
	again := 0
	for _, n := range reads {
		again += n - 1
	}
	t.Logf("%d kills; %d files read again that were not done", kills, again)
	require.Len(t, reads, files)
	require.Greater(t, kills, 5)
}

// TestKill9WhilePrinting: the queue stays until everything is printed.
func TestKill9WhilePrinting(t *testing.T) {
	t.Parallel()
	root, queue := filepath.Join(t.TempDir(), "tree"), filepath.Join(t.TempDir(), "queue")
	for i := range 600 { // more than a pipe holds
		write(t, filepath.Join(root, fmt.Sprintf("%0200d", i)), fmt.Sprint(i))
	}
	args := []string{"-queue", queue, root}
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), childEnv+"=1")
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	_, err = io.ReadFull(stdout, make([]byte, 1))
	require.NoError(t, err)
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())

	out, rest, _ := child(t, args, 0, func(event, name string) {
		if event != "done" {
			t.Errorf("%s %s again", event, name)
		}
	})
	require.Empty(t, rest)
	require.Equal(t, expected(t, root), out)
	require.NoDirExists(t, queue)
}
