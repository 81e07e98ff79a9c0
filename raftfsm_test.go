package codeq

import (
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/cluster"
	"codeq/internal/schema"
	"codeq/internal/store"
)

// TestApply: what an entry says is in the store, with its index, however large it is.
func TestApply(t *testing.T) {
	opts, err := (&Options{fs: vfs.NewMem(), Cluster: &Cluster{Node: "x", Listen: "x:1"}}).withDefaults()
	require.NoError(t, err)
	opts.setShards(1)
	caches := store.NewCaches(opts.CacheBytes, opts.MemTableBytes, 1)
	defer caches.Close()
	st, err := store.Open("store", opts.storeConfig(), caches, true)
	require.NoError(t, err)
	defer func() { require.NoError(t, st.Close()) }()
	m := &stateMachine{replica: &replica{store: st}, adopt: func([]byte) error { return nil }}
	apply := func(index, term uint64, value string) {
		b := st.DB().NewBatch()
		defer func() { require.NoError(t, b.Close()) }()
		require.NoError(t, b.Set([]byte("k"), []byte(value), nil))
		require.NoError(t, m.Apply(cluster.Entry{Index: index, Term: term, Data: (&entry{batch: b.Repr()}).append(nil)}))
		v, err := schema.Lookup(st.DB(), []byte("k"))
		require.NoError(t, err)
		require.Equal(t, value, string(v))
		appliedIndex, appliedTerm, err := schema.Applied(st.DB())
		require.NoError(t, err)
		require.Equal(t, [2]uint64{index, term}, [2]uint64{appliedIndex, appliedTerm})
	}
	apply(5, 2, "first")
	apply(7, 4, "second")
	apply(8, 4, strings.Repeat("x", 2*largeBatch)) // Pebble keeps the memory of these
	apply(9, 4, "third")
	require.ErrorIs(t, m.Apply(cluster.Entry{Index: 10, Term: 4, Data: []byte("bad")}), ErrCorrupt)
}
