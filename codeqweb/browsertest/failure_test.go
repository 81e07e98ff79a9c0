package browsertest

import (
	"context"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/testkit"
)

// TestShardFails: a shard fails while its queue is watched. The page says so, and keeps the numbers
// that it has.
func TestShardFails(t *testing.T) {
	t.Parallel()
	disk, broken := testkit.Breakable(vfs.NewMem(), "write", ".log", testkit.ErrBroken)
	opts := &codeq.Options{Shards: 2}
	inspect.Options(opts).FS = disk
	s := newSite(t, *opts)
	s.fill(4, codeq.Task{Queue: "mail"})
	w := newTab(t, s)
	w.waitText("#total-ready", "4")
	w.mark()
	w.waitText("#live-state", "live")
	broken.Store(true)
	for err := error(nil); err == nil; { // until a task comes to the failed shard
		_, err = s.q.Produce(context.Background(), codeq.Task{Queue: "mail"})
	}
	w.wait(`document.querySelector("#sample-error")`)
	w.same()
	require.Contains(t, w.text("#sample-error"), "does not answer")
	require.NotEqual(t, "0", w.text("#total-ready"), "the numbers are those from before")

	w.allow("503")
	for _, path := range []string{"healthz", "readyz"} {
		require.Equal(t, 503, eval[int](w, `fetch(`+quoted(w.root+path)+`).then((a) => a.status)`))
	}
	// Other pages report it, and no page hangs.
	w.open("")
	require.Equal(t, 1, w.count("#sample-error"))
	require.Empty(t, eval[[]string](w, faultsIn))
	for _, path := range []string{"queue?name=mail", "tasks", "dead", "storage", "workers", "cluster", "audit"} {
		w.open(path)
		require.NotEmpty(t, w.text("h1"), path)
		require.Empty(t, eval[[]string](w, faultsIn), path)
	}
	w.open("cluster")
	require.Contains(t, w.text("#problems"), "shard", "the reason comes first")
	w.open("workers")
	require.Contains(t, w.text("#unread"), "not known")
	w.open("storage")
	require.Contains(t, w.text("#usage-error"), "could not be read")
	w.open("tasks")
	require.Equal(t, "failed", eval[string](w, `document.querySelector("#error").dataset.kind`))
	require.Contains(t, eval[string](w, "document.body.innerText"), "its storage failed")

	// Pages of a closed queue do the same.
	w.open("storage")
	require.Error(t, s.q.Close())
	w.open("tasks")
	require.Equal(t, "closed", eval[string](w, `document.querySelector("#error").dataset.kind`))
}
