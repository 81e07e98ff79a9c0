package killtest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// stepsChildConfig is the configuration of a child that works on a task in steps.
type stepsChildConfig struct {
	Dir    string
	ID     codeq.ID // of the task
	StopAt int      // the point at which the handler waits for the kill of the child; negative: none
}

// stepPoints is how many points the handler of the child has.
const stepPoints = 8

// stepsChild works on the task of a queue until it has ended, or its handler has reached the point
// StopAt. Each step of a handler adds a line to the file "effects".
func stepsChild(c stepsChildConfig) error {
	q, err := codeq.Open(filepath.Join(c.Dir, "queue"), &codeq.Options{Shards: 2, Durability: codeq.DurabilityProcess, MaxAttempts: 100})
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- q.Run(ctx, stepsMux(q, c), nil) }()
	if _, err := q.Await(ctx, c.ID); err != nil {
		return err
	}
	stop()
	return errors.Join(<-ended, q.Close())
}

func stepsMux(q *codeq.Queue, c stepsChildConfig) *codeq.Mux {
	effect := func(ctx context.Context, name string) error {
		got, err := codeq.Step(ctx, name, func(context.Context) (string, error) {
			f, err := os.OpenFile(filepath.Join(c.Dir, "effects"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
			if err != nil {
				return "", err
			}
			_, err = fmt.Fprintln(f, name)
			return name, errors.Join(err, f.Close())
		})
		if err == nil && got != name {
			err = codeq.DeadLetter(fmt.Errorf("step %q returned %q", name, got))
		}
		return err
	}
	point := 0
	reached := func() {
		if point == c.StopAt {
			fmt.Println(point)
			select {}
		}
		point++
	}
	m := new(codeq.Mux)
	codeq.Handle(m, "child", func(ctx context.Context, j *codeq.Job[string]) error {
		if err := effect(ctx, "of the child"); err != nil {
			return err
		}
		return j.SetResultValue("grown")
	})
	codeq.Handle(m, "parent", func(ctx context.Context, j *codeq.Job[[]byte]) error {
		point = 0
		for _, step := range []func() error{
			func() error { return effect(ctx, "first") },
			func() error { return effect(ctx, "second") },
			func() error { return codeq.Sleep(ctx, "pause", time.Millisecond) },
			func() error { return effect(ctx, "third") },
			func() error {
				if err := q.Signal(ctx, j.ID, "go", 1); err != nil && !errors.Is(err, codeq.ErrDuplicate) {
					return err
				}
				_, err := codeq.WaitSignal[int](ctx, "go", time.Hour)
				return err
			},
			func() error {
				how, err := codeq.Child[string](ctx, "child", codeq.Task{Queue: "child"})
				if err == nil && how != "grown" {
					err = codeq.DeadLetter(fmt.Errorf("the child is %q", how))
				}
				return err
			},
			func() error { return effect(ctx, "last") },
		} {
			reached()
			if err := step(); err != nil {
				return err
			}
		}
		reached()
		return nil
	})
	return m
}

// TestStepsOfKilledProcesses kills the process of a task with -9 between each two of its steps. All
// of them are done once.
func TestStepsOfKilledProcesses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	q, err := codeq.Open(filepath.Join(dir, "queue"), &codeq.Options{Shards: 2})
	require.NoError(t, err)
	id, err := q.Produce(t.Context(), codeq.Task{Queue: "parent", Retention: codeq.Forever})
	require.NoError(t, errors.Join(err, q.Close()))
	for point := range stepPoints {
		at := make(chan string, 1)
		c := start(t, command(t, thisBuild(t), "steps", stepsChildConfig{dir, id, point}), func(out io.Reader) {
			for lines := bufio.NewScanner(out); lines.Scan(); {
				at <- lines.Text()
			}
			close(at)
		})
		require.Equal(t, fmt.Sprint(point), <-at)
		c.kill()
	}
	c := start(t, command(t, thisBuild(t), "steps", stepsChildConfig{dir, id, -1}), func(out io.Reader) { _, _ = io.Copy(io.Discard, out) })
	require.NoError(t, c.wait())
	effects, err := os.ReadFile(filepath.Join(dir, "effects"))
	require.NoError(t, err)
	require.Equal(t, []string{"first", "second", "third", "of the child", "last"}, strings.Split(strings.TrimSpace(string(effects)), "\n"))

	q, err = codeq.Open(filepath.Join(dir, "queue"), nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	info, err := q.Get(t.Context(), id)
	require.NoError(t, err)
	require.Equal(t, codeq.Done, info.State, info.LastError)
	require.Len(t, info.Steps, 8)
}
