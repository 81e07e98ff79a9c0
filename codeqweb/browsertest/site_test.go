package browsertest

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// site is a dashboard that is served below a prefix.
type site struct {
	t      *testing.T
	q      *codeq.Queue
	root   string // URL, with a slash at the end
	access atomic.Uint32

	mu      sync.Mutex
	audited []codeqweb.Entry
}

// serve serves a dashboard of a queue until the test ends.
func serve(t *testing.T, q *codeq.Queue) *site {
	t.Helper()
	s := &site{t: t, q: q}
	s.access.Store(uint32(codeqweb.All))
	d := codeqweb.Handler(q, &codeqweb.Options{
		Access: func(*http.Request) codeqweb.Access { return codeqweb.Access(s.access.Load()) },
		Audit: func(_ *http.Request, e *codeqweb.Entry) {
			s.mu.Lock()
			defer s.mu.Unlock()
			e.User = "ann"
			s.audited = append(s.audited, *e)
		},
	})
	server := httptest.NewServer(http.StripPrefix("/admin/jobs", d))
	s.root = server.URL + "/admin/jobs/"
	t.Cleanup(func() {
		require.NoError(t, d.Close()) // ends the streams
		server.Close()
	})
	return s
}

// newSite serves a dashboard of a new queue. It skips the test if there is no browser.
func newSite(t *testing.T, opts codeq.Options) *site {
	t.Helper()
	needBrowser(t)
	q, err := codeq.Open(t.TempDir(), &opts)
	require.NoError(t, err)
	t.Cleanup(func() { _ = q.Close() }) // it may have failed
	return serve(t, q)
}

// log returns the audit entries so far.
func (s *site) log() []codeqweb.Entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.audited)
}

func (s *site) produce(task codeq.Task) codeq.ID {
	s.t.Helper()
	id, err := s.q.Produce(context.Background(), task)
	require.NoError(s.t, err)
	return id
}

// fill produces n tasks like one.
func (s *site) fill(n int, task codeq.Task) {
	s.t.Helper()
	for n > 0 {
		batch := slices.Repeat([]codeq.Task{task}, min(n, 1000))
		n -= len(batch)
		_, err := s.q.ProduceBatch(context.Background(), batch)
		require.NoError(s.t, err)
	}
}

func (s *site) claim(queue string) *codeq.Lease {
	s.t.Helper()
	l, err := s.q.Claim(context.Background(), codeq.ClaimRequest{Queues: []string{queue}, NoWait: true, Worker: "w-1", LeaseFor: time.Hour})
	require.NoError(s.t, err)
	return l
}

// dead makes a dead letter.
func (s *site) dead(task codeq.Task, cause string) codeq.ID {
	s.t.Helper()
	id := s.produce(task)
	l := s.claim(task.Queue)
	require.Equal(s.t, id, l.ID)
	require.NoError(s.t, s.q.DeadLetter(context.Background(), l.Receipt, errors.New(cause)))
	return id
}

func (s *site) task(id codeq.ID) *codeq.TaskInfo {
	s.t.Helper()
	info, err := s.q.Get(context.Background(), id)
	require.NoError(s.t, err)
	return info
}

func (s *site) counts(queue string) codeq.Counts {
	s.t.Helper()
	stats, err := s.q.Stats(context.Background())
	require.NoError(s.t, err)
	return stats[queue]
}

func (s *site) settings(queue string) codeq.Settings {
	s.t.Helper()
	settings, err := s.q.Settings(queue)
	require.NoError(s.t, err)
	return settings
}

// work runs handlers for a queue until the test ends.
func (s *site) work(name, queue string, h func(context.Context, *codeq.Job[[]byte]) error) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var mux codeq.Mux
	codeq.Handle(&mux, queue, h)
	ended := make(chan error, 1)
	go func() { ended <- s.q.Run(ctx, &mux, &codeq.RunOptions{Name: name, Concurrency: 2}) }()
	s.t.Cleanup(func() {
		cancel()
		require.NoError(s.t, <-ended)
	})
	require.Eventually(s.t, func() bool { return s.quiet(name) != "unknown" }, patience, time.Millisecond)
}

// quiet says whether a worker takes new tasks.
func (s *site) quiet(name string) string {
	workers, err := s.q.Workers(context.Background())
	require.NoError(s.t, err)
	for _, w := range workers {
		switch {
		case w.Name != name:
		case w.Quiet:
			return "quiet"
		default:
			return "works"
		}
	}
	return "unknown"
}

func (s *site) schedule(name string) {
	s.t.Helper()
	require.NoError(s.t, s.q.SetSchedule(context.Background(), codeq.Schedule{
		Name: name, Cron: "30 4 * * *", TimeZone: "UTC", Task: codeq.Task{Queue: "report", Payload: []byte(`{"page":7}`)},
	}))
}

// scheduled returns a schedule; the zero value if there is none.
func (s *site) scheduled(name string) codeq.ScheduleInfo {
	s.t.Helper()
	all, err := s.q.Schedules(context.Background())
	require.NoError(s.t, err)
	for _, info := range all {
		if info.Name == name {
			return info
		}
	}
	return codeq.ScheduleInfo{}
}

// loaded serves a queue with content for every screen, and returns the IDs of its tasks.
func loaded(t *testing.T) (s *site, ids map[string]codeq.ID) {
	s = newSite(t, codeq.Options{Shards: 2, Retention: time.Hour})
	ctx := context.Background()
	ids = make(map[string]codeq.ID)
	ids["dead"] = s.dead(codeq.Task{Queue: "mail", Tenant: "acme", MaxAttempts: 2}, "user 17 is unknown")
	ids["dead2"] = s.dead(codeq.Task{Queue: "mail"}, "user 18 is unknown")
	ids["done"] = s.produce(codeq.Task{Queue: "mail", Payload: []byte(`{"to":"bob"}`)})
	require.NoError(t, s.q.Complete(ctx, s.claim("mail").Receipt, []byte("sent")))
	ids["canceled"] = s.produce(codeq.Task{Queue: "mail"})
	require.NoError(t, s.q.Cancel(ctx, ids["canceled"]))
	ids["retried"] = s.produce(codeq.Task{Queue: "mail", Payload: []byte("again")})
	for range 3 {
		require.NoError(t, s.q.Retry(ctx, s.claim("mail").Receipt, codeq.RetryOptions{Err: errors.New("timeout"), After: -1}))
	}
	ids["leased"] = s.produce(codeq.Task{Queue: "mail", Priority: 5, Payload: []byte("at work")})
	s.claim("mail")
	ids["ready"] = s.produce(codeq.Task{
		Queue: "mail", Tenant: "acme", Priority: 3, Payload: []byte(`{"secret":"xyzzy"}`), Headers: map[string]string{"trace": "xyzzy"},
		Unique: codeq.Unique{Key: "order-1"},
	})
	ids["scheduled"] = s.produce(codeq.Task{Queue: "mail", RunAt: time.Now().Add(time.Hour)})
	ids["child"] = s.produce(codeq.Task{Queue: "report", After: []codeq.ID{ids["ready"], ids["scheduled"]}})
	s.schedule("nightly")
	s.work("worker-1", "idle", func(context.Context, *codeq.Job[[]byte]) error { return nil })
	return s, ids
}

// screens returns the paths of all screens of a loaded site.
func screens(ids map[string]codeq.ID) []string {
	list := []string{
		"", "?span=24h&order=dead&find=m", "?span=90d", "queue?name=mail", "queue?name=nobody", "tasks", "tasks?state=blocked&queue=mail", "dead", "dead?queue=mail",
		"schedules", "workers", "storage", "cluster", "audit", "bulks", "tasks?queue=mail&newest=true&tenant=acme",
	}
	for _, state := range []string{"ready", "scheduled", "blocked", "leased", "dead", "done", "canceled"} {
		list = append(list, "tasks?state="+state)
	}
	for _, name := range []string{"dead", "done", "canceled", "retried", "leased", "ready", "scheduled", "child"} {
		list = append(list, "task?id="+ids[name].String(), "flow?id="+ids[name].String())
	}
	return list
}

// cluster opens three nodes on loopback addresses, and serves the dashboard of the first one.
func cluster(t *testing.T) *site {
	t.Helper()
	needBrowser(t)
	var listeners []net.Listener
	var peers []codeq.Peer
	for _, name := range []string{"ann", "bob", "cid"} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		listeners = append(listeners, l)
		peers = append(peers, codeq.Peer{Node: name, Address: l.Addr().String()})
	}
	nodes, errs := make([]*codeq.Queue, len(peers)), make([]error, len(peers))
	each := func(do func(i int) error) {
		var all sync.WaitGroup
		for i := range nodes {
			all.Go(func() { errs[i] = do(i) })
		}
		all.Wait()
		for _, err := range errs {
			require.NoError(t, err)
		}
	}
	dirs := []string{t.TempDir(), t.TempDir(), t.TempDir()}
	each(func(i int) (err error) {
		nodes[i], err = codeq.Open(dirs[i], &codeq.Options{Shards: 2, Cluster: &codeq.Cluster{
			Node: peers[i].Node, Listener: listeners[i], Peers: peers,
		}})
		return err
	})
	t.Cleanup(func() { each(func(i int) error { return nodes[i].Close() }) })
	each(func(i int) error {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		return nodes[i].WaitReady(ctx)
	})
	return serve(t, nodes[0])
}
