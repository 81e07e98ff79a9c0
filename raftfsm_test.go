package codeq

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/schema"
	"codeq/internal/store"
)

// TestOutdatedEntry: what a leader has decided in one term has no effect in the
// log of another one, and what has been applied has none again.
func TestOutdatedEntry(t *testing.T) {
	opts, err := (&Options{fs: vfs.NewMem(), Cluster: &Cluster{Node: "x", Listen: "x"}}).withDefaults()
	require.NoError(t, err)
	caches := store.NewCaches(opts.CacheBytes, opts.MemTableBytes, 1)
	defer caches.Close()
	st, err := store.Open("store", opts.storeConfig(), caches, true)
	require.NoError(t, err)
	defer func() { require.NoError(t, st.Close()) }()
	m := &stateMachine{replica: &replica{
		store: st, leading: newLeaderTerm(), node: &node{opts: opts.Cluster, log: opts.Logger, room: newLogRoom(opts, "", opts.Logger), queue: &Queue{opts: opts}},
	}}
	apply := func(index, term, decided uint64, value string) any {
		b := st.DB().NewBatch()
		defer func() { require.NoError(t, b.Close()) }()
		require.NoError(t, b.Set([]byte("k"), []byte(value), nil))
		e := entry{term: decided, batch: b.Repr()}
		return m.Apply(&raft.Log{Index: index, Term: term, Data: e.append(nil)})
	}
	stored := func() string {
		v, err := schema.Lookup(st.DB(), []byte("k"))
		require.NoError(t, err)
		return string(v)
	}
	require.Nil(t, apply(5, 2, 2, "first"))
	require.Equal(t, "first", stored())
	require.Equal(t, errOutdated, apply(6, 4, 3, "of a leader that was deposed meanwhile"))
	require.Equal(t, "first", stored())
	require.Nil(t, apply(7, 4, 4, "second"))
	require.Equal(t, "second", stored())
	require.Nil(t, apply(5, 2, 2, "first, replayed"))
	require.Equal(t, "second", stored())
	index, err := schema.Applied(st.DB())
	require.NoError(t, err)
	require.EqualValues(t, 7, index)
	large := make([]byte, 2*largeBatch) // Pebble keeps the memory of these
	require.Nil(t, apply(8, 4, 4, string(large)))
	require.Nil(t, apply(9, 4, 4, "third"))
	require.Equal(t, "third", stored())
}
