package browsertest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"codeq"
)

var (
	screenshots = flag.String("screenshots", "", "directory in which TestScreenshots makes the pictures for the README")
	watched     = flag.Int("watched", 200, "how many seconds the queue of the screenshots works before, for its charts")
)

// TestScreenshots makes pictures of a queue at work.
func TestScreenshots(t *testing.T) {
	if *screenshots == "" {
		t.Skip("no -screenshots DIR")
	}
	require.NoError(t, os.MkdirAll(*screenshots, 0o755))
	s := newSite(t, codeq.Options{Shards: 2, Retention: time.Hour, Backoff: codeq.Backoff{Base: 2 * time.Second}})
	task, again := s.business()
	w := newTab(t, s)
	w.waitText("#live-state", "live")
	for i := range *watched {
		w.wait(fmt.Sprintf("Number(document.body.dataset.ticks) > %d", i)) // one a second, or nearly
		if i == *watched*2/5 || i == *watched*4/5 {
			again()
		}
	}
	for _, p := range []struct {
		name, path, scheme string
		phone              bool
	}{
		{"overview", "", "light", false}, {"queue", "queue?name=orders", "light", false}, {"queue-phone", "queue?name=orders", "light", true}, {"dead", "dead", "light", false}, {"task-dark", "task?id=" + task.String(), "dark", false},
		{"overview-phone", "", "dark", true},
	} {
		if w.do(size(1280, 800, false), scheme(p.scheme)); p.phone {
			w.do(size(390, 844, true))
		}
		w.open(p.path)
		w.waitText("#live-state", "live")
		require.NoError(t, os.WriteFile(filepath.Join(*screenshots, p.name+".png"), run(w, chromedp.CaptureScreenshot()), 0o644))
	}
}

// business keeps a queue at work until the test ends. It returns a task for a screenshot; again
// ends its attempt and begins another one.
func (s *site) business() (id codeq.ID, again func()) {
	s.t.Helper()
	handle := func(takes time.Duration, fails uint8, why string) func(context.Context, *codeq.Job[[]byte]) error {
		return func(ctx context.Context, j *codeq.Job[[]byte]) error {
			select {
			case <-time.After(takes):
			case <-ctx.Done():
				return ctx.Err()
			}
			if n := j.ID[len(j.ID)-1]; n < fails {
				return fmt.Errorf("%s (request %d)", why, 4000+int(n)*31)
			}
			return nil
		}
	}
	s.work("web-1", "mail", handle(8*time.Millisecond, 4, "mailbox unavailable"))
	s.work("web-2", "orders", handle(15*time.Millisecond, 9, "the bank does not answer"))
	s.work("gpu-1", "thumbnails", handle(60*time.Millisecond, 2, `cannot decode "image.webp"`))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	s.t.Cleanup(func() { cancel(); <-ended })
	order := codeq.Task{
		Queue: "invoices", Tenant: "acme", Priority: 4, MaxAttempts: 5, Headers: map[string]string{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"},
		Payload: []byte(`{"order":81724,"customer":"acme","lines":[{"sku":"A-1","count":3},{"sku":"B-7","count":1}],"total":"129.50"}`),
		Unique:  codeq.Unique{Key: "order-81724"},
	}
	id = s.produce(order)
	for _, after := range []string{"reports", "mail-later"} {
		s.produce(codeq.Task{Queue: after, After: []codeq.ID{id}})
	}
	l := s.claim("invoices")
	again = func() {
		refused := errors.New("connection refused: 10.0.3.17:5432")
		require.NoError(s.t, s.q.Retry(context.Background(), l.Receipt, codeq.RetryOptions{Err: refused, After: -1}))
		l = s.claim("invoices")
	}
	s.schedule("nightly-report")
	require.NoError(s.t, s.q.SetSchedule(ctx, codeq.Schedule{Name: "cleanup", Every: 15 * time.Minute, Task: codeq.Task{Queue: "cleanup"}}))
	s.fill(40, codeq.Task{Queue: "newsletter", RunAt: time.Now().Add(3 * time.Hour)})
	require.NoError(s.t, s.q.Pause(ctx, "newsletter"))
	go func() {
		defer close(ended)
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for i := 0; ; i++ {
			wave := 1 + math.Sin(float64(i)/150)
			var tasks []codeq.Task
			for queue, n := range map[string]float64{"mail": 6 * wave, "orders": 8 * wave, "thumbnails": 2.6 * wave} {
				for range int(n) {
					tasks = append(tasks, codeq.Task{Queue: queue, Tenant: []string{"acme", "globex", "initech"}[i%3], MaxAttempts: 2, Payload: []byte(`{"n":1}`)})
				}
			}
			if len(tasks) > 0 {
				_, _ = s.q.ProduceBatch(ctx, tasks)
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	}()
	return id, again
}
