package peer

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestLines: for a frequent event, the first lines are logged, and then one line an interval, with
// the number of the others. A different event is logged beside it. After a long pause, the same
// event counts as new.
func TestLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		l := NewLines(slog.New(slog.NewTextHandler(&log, nil)))
		flood := func(lines int) {
			for i := range lines {
				l.Log(slog.LevelWarn, "refused", "a", "n", i)
			}
		}
		logged := func(want int) []string {
			t.Helper()
			synctest.Wait()
			l.mu.Lock()
			defer l.mu.Unlock()
			lines := strings.SplitAfter(log.String(), "\n")
			log.Reset()
			require.Len(t, lines, want+1)
			return lines
		}
		flood(1000)
		l.Log(slog.LevelWarn, "refused", "b")
		require.Contains(t, logged(logFull + 1)[logFull-1], "n=9")
		time.Sleep(logEvery)
		require.Contains(t, logged(1)[0], "msg=refused n=999 more=990")
		flood(5)
		time.Sleep(logEvery)
		require.Contains(t, logged(1)[0], "n=4 more=5")
		time.Sleep(logEvery)
		logged(0)
		require.Empty(t, l.events)
		flood(logFull + 2)
		logged(logFull)
		l.Close()
		require.Contains(t, logged(1)[0], "more=2")
		flood(1)
		logged(0)
	})
}

// TestBadConnectionsAreCounted: any number of connections without a header, failed dials and failed
// Accepts is a few lines in the log.
func TestBadConnectionsAreCounted(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		var log bytes.Buffer
		n := New(Config{
			Identity: identityOf("a"), Listener: nw.listen("a"), Dial: nw.dial, Groups: 1, Timeout: testTimeout,
			Logger: slog.New(slog.NewTextHandler(&log, nil)),
		})
		const attempts = 500
		for i := range attempts {
			c, err := nw.dial(t.Context(), "a")
			require.NoError(t, err)
			_, _ = fmt.Fprintf(c, "GET /%d HTTP/1.1\r\n\r\n%s", i, strings.Repeat("x", 200))
			require.NoError(t, c.Close())
			_, err = n.Call(t.Context(), at("b"), 1, nil)
			require.Error(t, err)
			time.Sleep(lastBackoff)
		}
		require.NoError(t, n.Close())
		require.Positive(t, strings.Count(log.String(), "connection not accepted"))
		require.Positive(t, strings.Count(log.String(), "no connection"))
		intervals := int(attempts*lastBackoff/logEvery) + 2 // one begins late, one is ended by Close
		require.LessOrEqual(t, strings.Count(log.String(), "\n"), 2*(logFull+intervals))
	})
}
