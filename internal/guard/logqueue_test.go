package guard

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// slowHandler waits before each record until it may take it.
type slowHandler struct {
	slog.Handler
	gate <-chan struct{}
}

func (h slowHandler) Enabled(ctx context.Context, l slog.Level) bool {
	<-h.gate
	return h.Handler.Enabled(ctx, l)
}

func (h slowHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return slowHandler{h.Handler.WithAttrs(attrs), h.gate}
}

func (h slowHandler) WithGroup(name string) slog.Handler {
	return slowHandler{h.Handler.WithGroup(name), h.gate}
}

// TestQueue: callers do not wait for the handler. Before Close returns, it gets the records in
// their order and the number of lost ones. After Close it gets nothing.
func TestQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		gate := make(chan struct{})
		log, q := NewLogQueue(slowHandler{slog.NewTextHandler(&out, nil), gate})
		log.With("a", 1).WithGroup("g").Info("first", "b", 2)
		synctest.Wait() // the handler has the record
		for range depth + 7 {
			log.Info("next")
		}
		close(gate)
		begun := time.Now()
		q.Close()
		if took := time.Since(begun); took != 0 {
			t.Errorf("Close took %v", took)
		}
		log.Info("too late")
		synctest.Wait()
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if len(lines) != depth+2 {
			t.Fatalf("%d lines", len(lines))
		}
		for i, want := range map[int]string{0: "msg=first a=1 g.b=2", depth: "msg=next", depth + 1: "count=7"} {
			if !strings.HasSuffix(lines[i], want) {
				t.Errorf("line %d is %q, expected %q", i, lines[i], want)
			}
		}
	})
}

// TestCloseGivesUp: Close waits for a blocked handler until grace is over.
func TestCloseGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		log, q := NewLogQueue(slowHandler{slog.DiscardHandler, gate})
		log.Info("blocked")
		begun := time.Now()
		q.Close()
		if took := time.Since(begun); took != grace {
			t.Errorf("Close took %v", took)
		}
		close(gate) // otherwise the goroutine does not end
	})
}
