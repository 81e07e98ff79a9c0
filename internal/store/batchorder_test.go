package store

import (
	"bytes"
	"log/slog"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"codeq/internal/crashfs"
	"codeq/internal/failstop"
)

// TestBatchOrder: a sorted batch has the same effect, and its keys are in order.
func TestBatchOrder(t *testing.T) {
	open := func() *pebble.DB {
		db, err := pebble.Open("", &pebble.Options{FS: crashfs.New(), Logger: failstop.New(slog.New(slog.DiscardHandler), "test")})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, db.Close()) })
		return db
	}
	plain, sorted := open(), open()
	entries := func(db *pebble.DB) (all []string) {
		it, err := db.NewIter(nil)
		require.NoError(t, err)
		for valid := it.First(); valid; valid = it.Next() {
			all = append(all, string(it.Key())+"="+string(it.Value()))
		}
		require.NoError(t, it.Close())
		return all
	}
	var o batchOrder
	rapid.Check(t, func(t *rapid.T) {
		key := rapid.SliceOfN(rapid.ByteRange('a', 'c'), 1, 12)
		b := plain.NewBatch()
		if rapid.Bool().Draw(t, "range") {
			require.NoError(t, b.DeleteRange(key.Draw(t, "from"), []byte("d"), nil))
		}
		for i := range rapid.IntRange(0, 40).Draw(t, "entries") {
			k := key.Draw(t, "key")
			switch rapid.IntRange(0, 20).Draw(t, "kind") {
			case 0:
				require.NoError(t, b.DeleteRange(k, []byte("c"), nil))
			case 1, 2, 3, 4, 5:
				require.NoError(t, b.Delete(k, nil))
			default:
				require.NoError(t, b.Set(k, []byte{byte(i)}, nil))
			}
		}
		require.NoError(t, plain.Apply(b, nil))
		again := sorted.NewBatch()
		require.NoError(t, again.SetRepr(bytes.Clone(b.Repr())))
		n, late := again.Count(), false
		got := o.sort(sorted, again)
		require.Equal(t, n, got.Count())
		var last []byte
		for r := got.Reader(); ; {
			kind, k, _, ok, err := r.Next()
			require.NoError(t, err)
			if !ok {
				break
			}
			if kind == pebble.InternalKeyKindRangeDelete {
				late = late || last != nil
				continue
			}
			require.True(t, late || got == again || bytes.Compare(last, k) <= 0)
			last = k
		}
		require.Equal(t, late, got == again)
		require.NoError(t, sorted.Apply(got, nil))
		require.Equal(t, entries(plain), entries(sorted))
	})
}
