package codeqweb

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestFamilyIsRedacted: the parents and children of a task are as Options.Redact shows them.
func TestFamilyIsRedacted(t *testing.T) {
	t.Parallel()
	q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: 1})
	require.NoError(t, err)
	defer q.Close()
	d := Handler(q, &Options{Redact: func(t *codeq.TaskInfo) { t.Queue = "hidden" }})
	defer d.Close()
	parent, err := q.Produce(t.Context(), codeq.Task{Queue: "secret"})
	require.NoError(t, err)
	child, err := q.Produce(t.Context(), codeq.Task{Queue: "secret", After: []codeq.ID{parent}})
	require.NoError(t, err)
	for _, id := range []codeq.ID{parent, child} {
		stored, err := q.Get(t.Context(), id)
		require.NoError(t, err)
		f, err := d.family(t.Context(), stored)
		require.NoError(t, err)
		all := append(f.Parents, f.Children...)
		require.Len(t, all, 1)
		require.Equal(t, "hidden", all[0].Queue)
	}
}
