package codeq_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"codeq"
	"codeq/internal/manifest"
	"codeq/internal/peer"
	"codeq/internal/platform"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// served is a queue that this process serves to other programs.
type served struct {
	*codeq.Queue
	dir   string
	began <-chan string // the paths of sockets
}

// openServed opens a queue in a directory, ready for serve.
func openServed(t *testing.T, dir string, opts codeq.Options) *served {
	t.Helper()
	began := make(chan string, 100)
	h := testkit.NewUserHandler(func(string) {})
	opts.Logger = slog.New(socketWatch{h, began})
	q, err := codeq.Open(dir, &opts)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, q.Close()) })
	return &served{q, dir, began}
}

// socketWatch sends the path of each socket that the queue opens.
type socketWatch struct {
	slog.Handler
	began chan<- string
}

func (w socketWatch) Handle(ctx context.Context, r slog.Record) error {
	if r.Message == "serving programs on this machine" {
		r.Attrs(func(a slog.Attr) bool { w.began <- a.Value.String(); return true })
	}
	return w.Handler.Handle(ctx, r)
}
func (w socketWatch) WithAttrs([]slog.Attr) slog.Handler { return w }

// serve serves the queue until the call of stop or the end of the test.
func (s *served) serve(t *testing.T) (socket string, stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.ServeLocal(ctx) }()
	select {
	case socket = <-s.began:
	case err := <-ended:
		require.NoError(t, err)
		require.Fail(t, "it does not serve")
	}
	stop = func() error {
		cancel()
		err := <-ended
		ended <- err
		return err
	}
	t.Cleanup(func() { _ = stop() })
	return socket, stop
}

// client opens a served queue as another program does.
func (s *served) client(t *testing.T) *codeq.Queue {
	t.Helper()
	c, err := codeq.OpenLocal(t.Context(), s.dir)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// TestLocalShowsTheSame: another program sees the same queue as the process. The golden queue has
// an example of everything that a queue can store.
func TestLocalShowsTheSame(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "queue")
	extract(t, golden("closed"), dir)
	s := openServed(t, dir, codeq.Options{})
	s.serve(t)
	c := s.client(t)
	want := show(t, s)
	for state := codeq.Ready; state <= codeq.Canceled; state++ {
		require.NotEmpty(t, want.Lists[state.String()], state)
	}
	inJSON := func(s shown) string {
		b, err := json.MarshalIndent(s, "", " ")
		require.NoError(t, err)
		return string(b)
	}
	require.Equal(t, inJSON(want), inJSON(show(t, c)))
	stats, err := c.StorageStats()
	require.NoError(t, err)
	own, err := s.StorageStats()
	require.NoError(t, err)
	require.Len(t, stats.Shards, len(own.Shards))
	require.Equal(t, own.Shards[0].Tables, stats.Shards[0].Tables)
	require.Len(t, stats.Shards[0].Upkeep, len(own.Shards[0].Upkeep))
}

// TestLocalOddNames: another program gets names and keys with control characters unchanged.
func TestLocalOddNames(t *testing.T) {
	t.Parallel()
	s := openServed(t, t.TempDir(), codeq.Options{Shards: 2})
	s.serve(t)
	queuetest.RequireOddTexts(t, s.Queue, s.client(t))
}

// TestLocalSteers: the changes of another program take effect in the queue.
func TestLocalSteers(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := openServed(t, t.TempDir(), codeq.Options{Shards: 2, Limits: codeq.Limits{Payload: 3 << 20}})
	s.serve(t)
	c := s.client(t)

	id, err := c.Produce(ctx, codeq.Task{Queue: "a", Payload: make([]byte, 2<<20), Unique: codeq.Unique{Key: "k"}})
	require.NoError(t, err, "the limits are those of the process")
	require.Len(t, queuetest.InfoOf(t, s.Queue, id).Payload, 2<<20)
	info, err := c.Get(ctx, id)
	require.NoError(t, err)
	require.Equal(t, codeq.Ready, info.State)
	_, err = c.Produce(ctx, codeq.Task{Queue: "a", Payload: make([]byte, 4<<20)})
	require.ErrorIs(t, err, codeq.ErrInvalid)
	var duplicate *codeq.DuplicateError
	_, err = c.Produce(ctx, codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "k"}})
	require.ErrorAs(t, err, &duplicate)
	require.Equal(t, &codeq.DuplicateError{Key: "k", ID: id}, duplicate)
	require.NoError(t, c.ReleaseKey(ctx, codeq.UniqueKey{Queue: "a", Key: "k"}))
	require.ErrorIs(t, c.ReleaseKey(ctx, codeq.UniqueKey{Queue: "a", Key: "k"}), codeq.ErrNotFound)
	ids, err := c.ProduceBatch(ctx, []codeq.Task{{Queue: "b"}, {Queue: "b"}, {Queue: "b", RunAt: time.Now().Add(time.Hour)}})
	require.NoError(t, err)
	require.NoError(t, c.SetPriority(ctx, ids[0], 7))
	require.Equal(t, 7, queuetest.InfoOf(t, s.Queue, ids[0]).Priority)
	require.NoError(t, c.SetRunAt(ctx, ids[2], time.Time{}))
	require.Equal(t, codeq.Ready, queuetest.InfoOf(t, s.Queue, ids[2]).State)
	require.NoError(t, c.Signal(ctx, ids[0], "s", 1))
	require.ErrorAs(t, c.Signal(ctx, ids[0], "s", 1), &duplicate)
	require.Equal(t, &codeq.DuplicateError{Signal: "s", ID: ids[0]}, duplicate)
	require.NoError(t, c.Cancel(ctx, ids[1]))
	require.ErrorIs(t, c.Cancel(ctx, codeq.ID{1}), codeq.ErrNotFound)

	// Another program can use a receipt of the process.
	require.NoError(t, c.Extend(ctx, queuetest.ClaimNow(t, s.Queue, "b").Receipt, time.Hour))
	l := queuetest.ClaimNow(t, s.Queue, "a")
	awaited := make(chan *codeq.Outcome)
	go func() {
		o, err := c.Await(ctx, id)
		if err != nil {
			t.Error(err)
		}
		awaited <- o
	}()
	for queuetest.Awaiting(t, []*codeq.Queue{s.Queue}, id) == 0 {
		runtime.Gosched()
	}
	require.NoError(t, c.Complete(ctx, l.Receipt, []byte("r"), codeq.Task{Queue: "c"}))
	require.Equal(t, &codeq.Outcome{State: codeq.Done, Result: []byte("r"), Attempts: 1}, <-awaited)
	require.ErrorIs(t, c.Complete(ctx, l.Receipt, nil), codeq.ErrLeaseLost)
	require.NoError(t, c.WaitIdle(ctx, "a"))

	for range 3 {
		queuetest.Produce(t, s.Queue, codeq.Task{Queue: "dead"})
		require.NoError(t, c.DeadLetter(ctx, queuetest.ClaimNow(t, s.Queue, "dead").Receipt, errors.New("no such mailbox")))
	}
	for dead, err := range c.List(ctx, codeq.ListOptions{State: codeq.Dead}) {
		require.NoError(t, err)
		require.Equal(t, "no such mailbox", dead.LastError)
		require.NoError(t, c.RedriveDead(ctx, dead.ID))
		break
	}
	n, err := c.PurgeDead(ctx, codeq.DeadFilter{Queue: "dead", Match: func(*codeq.TaskInfo) bool { return true }})
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.Equal(t, codeq.Counts{Ready: 1}, queuetest.CountsOf(t, c, "dead"))
	infos, err := c.Info(ctx)
	require.NoError(t, err)
	own, err := s.Info(ctx)
	require.NoError(t, err)
	require.Equal(t, own, infos)
	days, err := c.TotalsByDay(ctx, "dead")
	require.NoError(t, err)
	require.Equal(t, codeq.Totals{Produced: 3, Claimed: 3, Dead: 3}, days[0].Totals)

	require.NoError(t, c.Pause(ctx, "a"))
	require.NoError(t, c.Configure(ctx, "a", func(s *codeq.Settings) { require.True(t, s.Paused); s.Burst = 3 }))
	set, err := s.Settings("a")
	require.NoError(t, err)
	require.Equal(t, codeq.Settings{Paused: true, Burst: 3}, set)
	require.NoError(t, c.Resume(ctx, "a"))
	require.NoError(t, c.SetSchedule(ctx, goldenSchedule))
	schedules, err := c.Schedules(ctx)
	require.NoError(t, err)
	require.Equal(t, goldenSchedule, schedules[0].Schedule)
	require.NoError(t, c.PauseSchedule(ctx, goldenSchedule.Name))
	schedules, err = s.Schedules(ctx)
	require.NoError(t, err)
	require.True(t, schedules[0].Paused)
	require.NoError(t, c.ResumeSchedule(ctx, goldenSchedule.Name))
	require.NoError(t, c.DeleteSchedule(ctx, goldenSchedule.Name))
	require.ErrorIs(t, c.DeleteSchedule(ctx, goldenSchedule.Name), codeq.ErrNotFound)

	copied := filepath.Join(t.TempDir(), "copy")
	require.NoError(t, c.Checkpoint(ctx, copied))
	require.ErrorIs(t, c.Checkpoint(ctx, copied), fs.ErrExist)
	require.ErrorIs(t, c.Checkpoint(ctx, filepath.Join(s.dir, "copy")), codeq.ErrInvalid)
	require.Equal(t, queuetest.CountsOf(t, s.Queue, "dead"), readerCounts(t, copied, "dead"))
	require.Positive(t, sharedFiles(t, s.dir, copied))
	require.NoError(t, c.Checkpoint(ctx, copied+"2", codeq.CheckpointOptions{Copy: true}))
	require.Zero(t, sharedFiles(t, s.dir, copied+"2"))
	require.Equal(t, queuetest.CountsOf(t, s.Queue, "dead"), readerCounts(t, copied+"2", "dead"))
	require.NoError(t, c.WaitReady(ctx))
	_, err = c.ClusterStatus(ctx)
	require.ErrorIs(t, err, codeq.ErrNoCluster)
	require.NoError(t, queuetest.CheckAll(s.Queue))
}

// TestLocalVerbs: the process executes each method of a Queue for the program, or refuses it as
// unsupported. The test covers every method. An ended ctx and a closed queue give the usual errors.
func TestLocalVerbs(t *testing.T) {
	t.Parallel()
	s := openServed(t, t.TempDir(), codeq.Options{Shards: 2})
	s.serve(t)
	c := s.client(t)
	var m codeq.Mux
	codeq.Handle(&m, "run", func(context.Context, *codeq.Job[[]byte]) error { return nil })
	cause := errors.New("the user left")
	verbs := everyVerb(t, c, &m)
	waits := []string{"Await", "WaitIdle"} // first, since the other methods may end these waits
	others := slices.DeleteFunc(slices.Collect(maps.Keys(verbs)), func(name string) bool {
		return slices.Contains(waits, name) || name == "Subscribe" // it waits for events
	})
	for _, name := range slices.Concat(waits, others) {
		verb := verbs[name]
		err := error(nil)
		if slices.Contains(waits, name) {
			ctx, stop := context.WithTimeoutCause(t.Context(), time.Millisecond, cause)
			err = verb(ctx)
			stop()
			require.ErrorIs(t, err, context.DeadlineExceeded, name)
			require.ErrorIs(t, err, cause, name)
		} else {
			err = verb(t.Context())
		}
		switch name {
		case "Run", "Claim", "ClaimBatch", "ServeLocal":
			require.ErrorIs(t, err, errors.ErrUnsupported, name)
		case "ClusterStatus", "AddNode", "RemoveNode", "ReplaceNode", "TransferLeadership", "Drain", "Undrain":
			require.ErrorIs(t, err, codeq.ErrNoCluster, name)
		}
		if err != nil {
			requirePrefix(t, name, err)
			require.NotContains(t, err.Error(), "malformed", name)
			require.NotErrorIs(t, err, codeq.ErrNotServed, name)
			require.NotErrorIs(t, err, codeq.ErrUncertain, name)
		}
		if queuetest.TakesContext(name) && name != "Run" && name != "ServeLocal" && name != "Claim" && name != "ClaimBatch" && name != "Checkpoint" {
			ended, cancel := context.WithCancelCause(t.Context())
			cancel(cause)
			err := verb(ended)
			require.ErrorIs(t, err, context.Canceled, name)
			require.ErrorIs(t, err, cause, name)
		}
	}
	require.NoError(t, queuetest.CheckAll(s.Queue))
	require.NoError(t, c.Close())
	require.NoError(t, c.Close())
	for name, verb := range verbs {
		if err := verb(context.Background()); !errors.Is(err, errors.ErrUnsupported) {
			require.ErrorIs(t, err, codeq.ErrClosed, name)
		}
	}
}

// TestLocalEvents: a program receives the events of the process until the program closes its queue
// or the process stops serving.
func TestLocalEvents(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := openServed(t, t.TempDir(), codeq.Options{Shards: 2})
	_, stop := s.serve(t)
	c := s.client(t)
	_, err := c.Subscribe(codeq.SubscribeOptions{Buffer: -1})
	require.ErrorIs(t, err, codeq.ErrInvalid)
	sub, err := c.Subscribe(codeq.SubscribeOptions{Queues: []string{"a"}, Kinds: []codeq.EventKind{codeq.EventProduced, codeq.EventCompleted}})
	require.NoError(t, err)
	short, err := c.Subscribe(codeq.SubscribeOptions{Buffer: 2})
	require.NoError(t, err)
	require.True(t, queuetest.Watched(s.Queue))
	const n = 100
	for range n {
		queuetest.Produce(t, s.Queue, codeq.Task{Queue: "b"})
		id := queuetest.Produce(t, s.Queue, codeq.Task{Queue: "a"})[0]
		queuetest.Complete(t, s.Queue, queuetest.ClaimNow(t, s.Queue, "a"))
		for _, kind := range []codeq.EventKind{codeq.EventProduced, codeq.EventCompleted} {
			e, err := sub.Next(ctx)
			require.NoError(t, err)
			require.Equal(t, codeq.Event{Kind: kind, ID: id, Queue: "a", Attempt: e.Attempt, Time: e.Time}, e)
		}
	}
	require.Zero(t, sub.Lost())
	for got := uint64(2); short.Lost()+got < 4*n; { // until all events have arrived
		runtime.Gosched()
	}
	short.Close()
	_, err = short.Next(ctx)
	require.ErrorIs(t, err, codeq.ErrClosed)

	require.NoError(t, stop())
	_, err = sub.Next(ctx)
	require.ErrorIs(t, err, codeq.ErrNotServed)
	sub.Close()
	require.False(t, queuetest.Watched(s.Queue), "subscriptions have ended with their connection")
	s.serve(t)
	for sub, err = c.Subscribe(codeq.SubscribeOptions{}); err != nil; sub, err = c.Subscribe(codeq.SubscribeOptions{}) {
		require.ErrorIs(t, err, codeq.ErrNotServed) // the client connects again after a short pause
	}
	queuetest.Produce(t, s.Queue, codeq.Task{Queue: "a"})
	_, err = sub.Next(ctx)
	require.NoError(t, err)
	require.NoError(t, s.Close())
	_, err = sub.Next(ctx)
	require.True(t, errors.Is(err, codeq.ErrNotServed) || errors.Is(err, codeq.ErrClosed), "%v", err)
	require.NoError(t, c.Close())
	require.Zero(t, sub.Lost())
}

// TestLocalManyEvents: a program with the maximum number of subscriptions can still make calls. It
// waits before it makes more calls at a time than the process accepts.
func TestLocalManyEvents(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := openServed(t, t.TempDir(), codeq.Options{Shards: 1})
	s.serve(t)
	c := s.client(t)
	const most, mostWaits = 100, 80 // limit of subscriptions and of calls; limit of long calls
	var subs [most]*codeq.Subscription
	for i := range subs {
		sub, err := c.Subscribe(codeq.SubscribeOptions{Kinds: []codeq.EventKind{codeq.EventProduced}})
		require.NoError(t, err)
		subs[i] = sub
	}
	_, err := c.Subscribe(codeq.SubscribeOptions{})
	require.ErrorIs(t, err, codeq.ErrNotServed)
	id := queuetest.Produce(t, s.Queue, codeq.Task{Queue: "a", RunAt: time.Now().Add(time.Hour), Retention: time.Hour})[0]
	var calls errgroup.Group
	for range most { // long calls
		calls.Go(func() error { _, err := c.Await(ctx, id); return err })
	}
	for queuetest.Awaiting(t, []*codeq.Queue{s.Queue}, id) < mostWaits {
		runtime.Gosched()
	}
	var short errgroup.Group
	for range 3 * most {
		short.Go(func() error { _, err := c.Produce(ctx, codeq.Task{Queue: "b"}); return err })
	}
	require.NoError(t, short.Wait())
	require.NoError(t, c.Cancel(ctx, id))
	require.NoError(t, calls.Wait())
	for _, sub := range subs {
		e, err := sub.Next(ctx)
		require.NoError(t, err)
		require.Equal(t, id, e.ID)
		require.Zero(t, sub.Lost())
		sub.Close()
	}
	require.Eventually(t, func() bool { return !queuetest.Watched(s.Queue) }, time.Minute, time.Millisecond)
	sub, err := c.Subscribe(codeq.SubscribeOptions{})
	require.NoError(t, err)
	sub.Close()
}

// TestLocalGivenUpCalls: an abandoned call keeps its slot in the process for a while. This causes
// no errors in other calls of the program.
func TestLocalGivenUpCalls(t *testing.T) {
	t.Parallel()
	s := openServed(t, t.TempDir(), codeq.Options{Shards: 1})
	s.serve(t)
	c := s.client(t)
	var batch []codeq.Task
	for range 1000 {
		batch = append(batch, codeq.Task{Queue: "a", Payload: make([]byte, 100)})
	}
	queuetest.Produce(t, s.Queue, batch...)
	var callers errgroup.Group
	for i := range 100 {
		callers.Go(func() error {
			for n := range 10 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(200*(1+(i+n)%30))*time.Microsecond)
				_, err := c.ListPage(ctx, codeq.PageOptions{Limit: 1000})
				cancel()
				if err != nil && !errors.Is(err, context.DeadlineExceeded) {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(t, callers.Wait())
}

// TestLocalHistory: a program sees the progress and metadata of a handler, during the attempt and
// afterwards, and the worker's name in the history.
func TestLocalHistory(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := openServed(t, t.TempDir(), codeq.Options{Shards: 2, Retention: time.Hour})
	s.serve(t)
	c := s.client(t)
	sub, err := c.Subscribe(codeq.SubscribeOptions{Kinds: []codeq.EventKind{codeq.EventProgress}})
	require.NoError(t, err)
	var m codeq.Mux
	goOn := make(chan struct{})
	codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
		err := errors.Join(codeq.ReportProgress(ctx, 1, 2, "half"), codeq.SetMetadata(ctx, "k", "v"))
		<-goOn
		return err
	})
	startRun(t, s.Queue, &m, codeq.RunOptions{Name: "w"})
	id := queuetest.Produce(t, c, codeq.Task{Queue: "a"})[0]
	e, err := sub.Next(ctx)
	require.NoError(t, err)
	progress := codeq.Progress{1, 2, "half", e.Progress.At}
	require.Equal(t, codeq.Event{Kind: codeq.EventProgress, ID: id, Queue: "a", Attempt: 1, Time: e.Time, Progress: progress}, e)
	info := queuetest.InfoOf(t, c, id)
	require.Equal(t, progress, info.Progress)
	require.Equal(t, "w", info.History[0].Worker)
	close(goOn)
	_, err = c.Await(ctx, id)
	require.NoError(t, err)
	info = queuetest.InfoOf(t, c, id)
	require.Equal(t, progress, info.Progress)
	require.Equal(t, map[string]string{"k": "v"}, info.Metadata)
	require.Equal(t, codeq.EventCompleted, info.History[0].Outcome)
}

// TestLocalEnds: serving ends with its ctx or with the queue, and leaves no files and no goroutines
// behind. The process can serve again, and the same program then continues.
func TestLocalEnds(t *testing.T) {
	leaks := testkit.WatchLeaks()
	ctx := t.Context()
	dir := t.TempDir()
	_, err := codeq.OpenLocal(ctx, dir)
	require.ErrorIs(t, err, codeq.ErrNotQueue)
	s := openServed(t, dir, codeq.Options{})
	_, err = codeq.OpenLocal(ctx, dir)
	require.ErrorIs(t, err, codeq.ErrNotServed)
	ended, cancel := context.WithCancel(ctx)
	cancel()
	require.NoError(t, s.ServeLocal(ended))
	socket, stop := s.serve(t)
	require.Equal(t, filepath.Join(dir, "local", "socket"), socket)
	require.ErrorIs(t, s.ServeLocal(ctx), codeq.ErrInvalid, "beside another call")
	c := s.client(t)
	id := queuetest.Produce(t, c, codeq.Task{Queue: "a", RunAt: time.Now().Add(time.Hour)})[0]
	waits := make(chan error)
	go func() { _, err := c.Await(ctx, id); waits <- err }()
	for queuetest.Awaiting(t, []*codeq.Queue{s.Queue}, id) == 0 {
		runtime.Gosched()
	}
	require.NoError(t, stop())
	require.ErrorIs(t, <-waits, codeq.ErrNotServed)
	require.NoDirExists(t, filepath.Join(dir, "local"))
	_, err = c.Get(ctx, id)
	require.ErrorIs(t, err, codeq.ErrNotServed)
	_, err = c.Produce(ctx, codeq.Task{Queue: "a"})
	require.ErrorIs(t, err, codeq.ErrNotServed)
	require.NotErrorIs(t, err, codeq.ErrUncertain)

	_, stop = s.serve(t)
	for _, err = c.Get(ctx, id); err != nil; _, err = c.Get(ctx, id) { // it connects again soon
		require.ErrorIs(t, err, codeq.ErrNotServed)
	}
	require.NoError(t, s.Close())
	require.ErrorIs(t, stop(), codeq.ErrClosed)
	require.ErrorIs(t, s.ServeLocal(ctx), codeq.ErrClosed)
	require.NoDirExists(t, filepath.Join(dir, "local"))
	require.NoError(t, c.Close())
	leaks.Require(t, "closed")
}

// The child process serves the queue in the first directory, or waits for a task in the served
// queue of the second directory. It runs until the test kills it.
const serveDirEnv, awaitDirEnv = "CODEQ_SERVE_DIR", "CODEQ_AWAIT_DIR"

func TestHelperProcessServes(t *testing.T) {
	switch serve, await := os.Getenv(serveDirEnv), os.Getenv(awaitDirEnv); {
	case serve != "":
		s := openServed(t, serve, codeq.Options{Shards: 2})
		s.serve(t)
	case await != "":
		c, err := codeq.OpenLocal(t.Context(), await)
		require.NoError(t, err)
		_, err = c.Subscribe(codeq.SubscribeOptions{Queues: []string{"without events"}})
		require.NoError(t, err)
		id, err := c.Produce(t.Context(), codeq.Task{Queue: "a", RunAt: time.Now().Add(time.Hour)})
		require.NoError(t, err)
		go func() { _, _ = c.Await(t.Context(), id) }()
		defer c.Close()
	default:
		t.Skip("a child of TestLocalLeftOver, TestLocalKilledProgram and tests of copies")
	}
	fmt.Println(lockChildSays)
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// TestLocalLeftOver: a process that is killed leaves its socket behind. The next process replaces
// the socket, wherever it is. Until then, programs get ErrNotServed.
func TestLocalLeftOver(t *testing.T) {
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	for _, name := range []string{"short", strings.Repeat("long", 30)} {
		dir := filepath.Join(t.TempDir(), name)
		kill, _ := child(t, "TestHelperProcessServes", serveDirEnv+"="+dir)
		c, err := codeq.OpenLocal(t.Context(), dir)
		require.NoError(t, err)
		_, err = codeq.Open(dir, nil)
		require.ErrorIs(t, err, codeq.ErrLocked)
		id := queuetest.Produce(t, c, codeq.Task{Queue: "a"})[0]
		kill()
		// The client notices the end of the process after a while.
		for err = nil; err == nil || errors.Is(err, codeq.ErrUncertain); {
			_, err = c.Produce(t.Context(), codeq.Task{Queue: "b"})
		}
		require.ErrorIs(t, err, codeq.ErrNotServed)
		_, err = codeq.OpenLocal(t.Context(), dir)
		require.ErrorIs(t, err, codeq.ErrNotServed)
		s := openServed(t, dir, codeq.Options{})
		socket, stop := s.serve(t)
		require.LessOrEqual(t, len(socket), 103)
		require.Equal(t, codeq.Ready, queuetest.InfoOf(t, s.client(t), id).State)
		left, err := os.ReadDir(temp)
		require.NoError(t, err)
		if name == "short" {
			require.Empty(t, left)
		} else {
			require.Len(t, left, 1, "that of the killed process is gone")
			require.Equal(t, filepath.Join(temp, left[0].Name(), "socket"), socket)
			info, err := left[0].Info()
			require.NoError(t, err)
			require.EqualValues(t, 0o700, info.Mode().Perm())
		}
		for err = errors.New(""); err != nil; _, err = c.Get(t.Context(), id) {
		}
		require.NoError(t, stop())
		require.NoError(t, c.Close())
		left, err = os.ReadDir(temp)
		require.NoError(t, err)
		require.Empty(t, left)
		require.NoDirExists(t, filepath.Join(dir, "local"))
	}
}

// TestLocalPathTooLong: if the paths below the queue's directory and TMPDIR are too long, the
// socket is in /tmp. A relative XDG_RUNTIME_DIR is ignored.
func TestLocalPathTooLong(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("/tmp cannot be left out")
	}
	long := filepath.Join(t.TempDir(), strings.Repeat("long", 30))
	t.Setenv("TMPDIR", long)
	t.Setenv("XDG_RUNTIME_DIR", "relative")
	s := openServed(t, long, codeq.Options{})
	socket, stop := s.serve(t)
	require.True(t, strings.HasPrefix(socket, "/tmp/codeq-"), socket)
	require.Positive(t, len(show(t, s.client(t)).Settings)+1)
	require.NoError(t, stop())
	require.NoDirExists(t, filepath.Dir(socket))
}

// TestLocalKilledProgram: a program that is killed during its calls leaves no goroutine and no
// subscription in the process.
func TestLocalKilledProgram(t *testing.T) {
	s := openServed(t, t.TempDir(), codeq.Options{Shards: 1})
	s.serve(t)
	first, err := codeq.OpenLocal(t.Context(), s.dir)
	require.NoError(t, err)
	require.NoError(t, first.Close())
	leaks := testkit.WatchLeaks()
	kill, _ := child(t, "TestHelperProcessServes", awaitDirEnv+"="+s.dir)
	var id codeq.ID
	for info, err := range s.List(t.Context(), codeq.ListOptions{State: codeq.Scheduled}) {
		require.NoError(t, err)
		id = info.ID
	}
	for queuetest.Awaiting(t, []*codeq.Queue{s.Queue}, id) == 0 {
		runtime.Gosched()
	}
	require.True(t, queuetest.Watched(s.Queue))
	stacks := make([]byte, 1<<22)
	for !bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte("localsocket.(*subscriptions).next(")) {
		runtime.Gosched() // the end of this waiting call ends the subscription
	}
	kill()
	leaks.Require(t, "when the program was killed")
	require.False(t, queuetest.Watched(s.Queue))
	queuetest.Produce(t, s.Queue, codeq.Task{Queue: "a"})
}

// TestLocalDirectoryIsPrivate: the process and the program refuse a socket directory that is a
// link, a file, or open to other users. The process does not remove a file that is not a socket.
func TestLocalDirectoryIsPrivate(t *testing.T) {
	t.Parallel()
	s := openServed(t, t.TempDir(), codeq.Options{})
	local := filepath.Join(s.dir, "local")
	refused := func(want error) {
		t.Helper()
		err := testkit.InTime(t, "ServeLocal", func() error { return s.ServeLocal(t.Context()) })
		require.ErrorIs(t, err, want)
		requirePrefix(t, "ServeLocal", err)
		_, err = codeq.OpenLocal(t.Context(), s.dir)
		require.True(t, errors.Is(err, want) || errors.Is(err, codeq.ErrNotServed), "%v", err)
	}
	require.NoError(t, os.Mkdir(local, 0o755))
	refused(fs.ErrPermission)
	require.NoError(t, os.Remove(local))
	other := t.TempDir()
	require.NoError(t, os.Chmod(other, 0o700))
	require.NoError(t, os.Symlink(other, local))
	refused(fs.ErrPermission)
	require.NoError(t, os.Remove(local))
	require.NoError(t, os.WriteFile(local, nil, 0o700))
	refused(fs.ErrPermission)
	require.NoError(t, os.Remove(local))
	require.NoError(t, os.Mkdir(local, 0o700))
	kept := filepath.Join(local, "socket")
	require.NoError(t, os.WriteFile(kept, []byte("kept"), 0o600))
	require.ErrorContains(t, s.ServeLocal(t.Context()), "is no socket")
	require.FileExists(t, kept)
	require.NoError(t, os.Remove(kept))
	require.NoError(t, os.WriteFile(filepath.Join(local, "address"), []byte("relative/socket"), 0o600))
	require.ErrorContains(t, s.ServeLocal(t.Context()), "no path of a socket")
	require.NoError(t, os.RemoveAll(local))

	socket, stop := s.serve(t)
	for path, mode := range map[string]fs.FileMode{local: 0o700, socket: 0o600} {
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Equal(t, mode, info.Mode().Perm(), path)
	}
	require.NoError(t, os.Chmod(local, 0o755))
	_, err := codeq.OpenLocal(t.Context(), s.dir)
	require.ErrorIs(t, err, fs.ErrPermission)
	require.NoError(t, os.Chmod(local, 0o700))
	moved := filepath.Join(s.dir, "moved")
	require.NoError(t, os.Rename(local, moved))
	require.NoError(t, os.Symlink(moved, local))
	_, err = codeq.OpenLocal(t.Context(), s.dir)
	require.ErrorIs(t, err, fs.ErrPermission)
	require.NoError(t, os.Remove(local))
	require.NoError(t, os.Rename(moved, local))
	s.client(t)
	require.NoError(t, stop())
}

// TestLocalFormats: a process and a program with different formats refuse each other, and the error
// says so.
func TestLocalFormats(t *testing.T) {
	t.Parallel()
	s := openServed(t, t.TempDir(), codeq.Options{Shards: 1})
	socket, stop := s.serve(t)
	d, err := manifest.Look(platform.FS, s.dir)
	require.NoError(t, err)
	id, err := peer.ParseID(d.ID)
	require.NoError(t, err)
	dial := func(ctx context.Context, path string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}
	for _, f := range []int{manifest.Format - 1, manifest.Format + 1} {
		n := peer.New(peer.Config{
			Identity: peer.Identity{Cluster: id, ID: peer.ID{1}, Name: "client"}, Formats: peer.Formats{Newest: f, Least: f}, Dial: dial,
		})
		_, err := n.Call(t.Context(), peer.Target{ID: id, Name: "process", Address: socket}, 128, []byte("null"))
		var refused *peer.RefusedError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, peer.RefusedFormat, refused.Reason)
		require.NoError(t, n.Close())
	}
	// The process refuses calls that programs do not send, such as calls of nodes and of Raft.
	n := peer.New(peer.Config{
		Identity: peer.Identity{Cluster: id, ID: peer.ID{1}, Name: "client"},
		Formats:  peer.Formats{Newest: manifest.Format, Least: manifest.Format}, Dial: dial,
	})
	for kind := range 256 {
		_, err := n.Call(t.Context(), peer.Target{ID: id, Name: "process", Address: socket}, byte(kind), []byte{0, 9, 1})
		require.Error(t, err, kind)
		require.NotErrorIs(t, err, peer.ErrLost, kind)
	}
	_, err = n.Introduce(t.Context(), peer.Target{Name: "process", Address: socket}, 128, []byte("null"))
	require.ErrorContains(t, err, "introduction")
	require.NoError(t, n.Close())
	require.NoError(t, queuetest.CheckAll(s.Queue))
	require.NoError(t, stop())

	for _, f := range []int{manifest.Format - 1, manifest.Format + 1} {
		require.NoError(t, os.Mkdir(filepath.Dir(socket), 0o700))
		l, err := net.Listen("unix", socket)
		require.NoError(t, err)
		other := peer.New(peer.Config{
			Identity: peer.Identity{Cluster: id, ID: id, Name: "process"}, Formats: peer.Formats{Newest: f, Least: f}, Listener: l,
		})
		_, err = codeq.OpenLocal(t.Context(), s.dir)
		require.ErrorIs(t, err, codeq.ErrFormat)
		require.ErrorContains(t, err, fmt.Sprintf("knows format %d", min(f, manifest.Format)))
		require.NoError(t, other.Close())
		require.NoError(t, os.RemoveAll(filepath.Dir(socket)))
	}
}

// TestLocalNode: a program beside a cluster node calls all shards, whichever node leads them, and
// changes the members.
func TestLocalNode(t *testing.T) {
	ctx := t.Context()
	root := t.TempDir()
	var peers []codeq.Peer
	var listeners []net.Listener
	for _, name := range []string{"ann", "bob"} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		listeners = append(listeners, l)
		peers = append(peers, codeq.Peer{Node: name, Address: l.Addr().String()})
	}
	var nodes []*served
	for i, p := range peers {
		nodes = append(nodes, openServed(t, filepath.Join(root, p.Node), codeq.Options{
			Shards: 2, Cluster: &codeq.Cluster{Node: p.Node, Listener: listeners[i], Peers: peers},
		}))
	}
	require.NoError(t, nodes[1].WaitReady(ctx))
	nodes[1].serve(t)
	c := nodes[1].client(t)
	require.NoError(t, c.WaitReady(ctx))
	for shard := range 2 {
		require.Eventually(t, func() bool { // a transfer may be under way already
			return c.TransferLeadership(ctx, shard, peers[shard].Node) == nil
		}, 20*time.Second, 10*time.Millisecond)
	}
	require.NoError(t, c.WaitReady(ctx))
	st, err := c.ClusterStatus(ctx)
	require.NoError(t, err)
	require.Equal(t, "bob", st.Node)
	require.Len(t, st.Shards, 2)
	for i, shard := range st.Shards {
		require.Equal(t, peers[i].Node, shard.Placed)
		require.Len(t, shard.Replicas, 2)
	}
	sub, err := c.Subscribe(codeq.SubscribeOptions{})
	require.NoError(t, err)
	seen := make(map[int]bool)
	for len(seen) < 2 {
		id := queuetest.Produce(t, c, codeq.Task{Queue: "a", Unique: codeq.Unique{Key: fmt.Sprint(len(seen), time.Now().UnixNano())}})[0]
		seen[queuetest.ShardOf(id, 2)] = true
		e, err := sub.Next(ctx)
		require.NoError(t, err)
		require.Equal(t, id, e.ID)
		require.Equal(t, codeq.Ready, queuetest.InfoOf(t, c, id).State)
	}
	require.NoError(t, c.Pause(ctx, "a"))
	counts, err := c.Stats(ctx)
	require.NoError(t, err)
	own, err := nodes[0].Stats(ctx)
	require.NoError(t, err)
	require.Equal(t, own, counts)
	require.ErrorIs(t, c.RemoveNode(ctx, "cid"), codeq.ErrNotMember)
	require.ErrorIs(t, c.AddNode(ctx, codeq.Peer{}), codeq.ErrInvalid)
	require.ErrorIs(t, c.ReplaceNode(ctx, "", peers[0]), codeq.ErrInvalid)
	require.NoError(t, c.Drain(ctx))
	st, err = c.ClusterStatus(ctx)
	require.NoError(t, err)
	require.True(t, st.Shards[1].Replicas[0].Drained || st.Shards[1].Replicas[1].Drained)
	queuetest.Produce(t, c, codeq.Task{Queue: "a"})
	require.NoError(t, c.Undrain(ctx))
	stats, err := c.StorageStats()
	require.NoError(t, err)
	require.Len(t, stats.Shards, 2)
}

func readerCounts(t *testing.T, dir, queue string) codeq.Counts {
	t.Helper()
	counts, err := openReader(t, dir, nil).Stats(t.Context())
	require.NoError(t, err)
	return counts[queue]
}

// TestLocalWorkers: a program sees the workers of the process and can make them quiet.
func TestLocalWorkers(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := openServed(t, t.TempDir(), codeq.Options{})
	s.serve(t)
	c := s.client(t)
	running, stop := context.WithCancel(ctx)
	began, ended := make(chan struct{}), make(chan error, 1)
	var m codeq.Mux
	codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error {
		began <- struct{}{}
		return nil
	})
	go func() { ended <- s.Run(running, &m, &codeq.RunOptions{Name: "anna"}) }()
	queuetest.Produce(t, c, codeq.Task{Queue: "a"})
	<-began
	quiet := func() bool {
		all, err := c.Workers(ctx)
		require.NoError(t, err)
		require.Len(t, all, 1)
		require.Equal(t, "anna", all[0].Name)
		require.Equal(t, time.UTC, all[0].Since.Location())
		return all[0].Quiet
	}
	require.False(t, quiet())
	require.ErrorIs(t, c.QuietWorkers(ctx, "bob"), codeq.ErrNotFound)
	require.NoError(t, c.QuietWorkers(ctx, "anna"))
	require.True(t, quiet())
	id := queuetest.Produce(t, c, codeq.Task{Queue: "a"})[0]
	p, err := c.ListPage(ctx, codeq.PageOptions{TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Ready}}})
	require.NoError(t, err)
	require.Len(t, p.Tasks, 1)
	require.Equal(t, id, p.Tasks[0].ID)
	require.NoError(t, c.ResumeWorkers(ctx, ""))
	<-began
	stop()
	require.NoError(t, <-ended)
}

// TestNoCluster: a queue without Options.Cluster refuses cluster methods, and its directory cannot
// be opened as a node of a cluster.
func TestNoCluster(t *testing.T) {
	dir := t.TempDir()
	q, err := codeq.Open(dir, nil)
	require.NoError(t, err)
	_, err = q.ClusterStatus(t.Context())
	require.ErrorIs(t, err, codeq.ErrNoCluster)
	require.ErrorIs(t, q.AddNode(t.Context(), codeq.Peer{"a", "b"}), codeq.ErrNoCluster)
	require.ErrorIs(t, q.RemoveNode(t.Context(), "a"), codeq.ErrNoCluster)
	require.ErrorIs(t, q.TransferLeadership(t.Context(), 0, "a"), codeq.ErrNoCluster)
	require.ErrorIs(t, q.Drain(t.Context()), codeq.ErrNoCluster)
	require.ErrorIs(t, q.Undrain(t.Context()), codeq.ErrNoCluster)
	require.NoError(t, q.Close())
	_, err = codeq.Open(dir, &codeq.Options{Cluster: &codeq.Cluster{Node: "a", Listen: "127.0.0.1:1", Peers: []codeq.Peer{{"b", "b:1"}}}})
	require.ErrorIs(t, err, codeq.ErrNotMember)
	require.ErrorIs(t, codeq.RecoverCluster(dir, nil), codeq.ErrNoCluster)
}
