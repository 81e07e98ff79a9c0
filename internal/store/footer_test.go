package store

import (
	"context"
	"errors"
	"fmt"
	"path"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/crashfs"
	"codeq/internal/integrity"
	"codeq/internal/testkit"
)

// footerBits is the number of bits of a footer.
const footerBits = 8 * 53

// TestFooterBits flips each bit of the footers of tables in a store that was not closed. Each
// reader reports it, with the name of the table, or it does no harm.
func TestFooterBits(t *testing.T) {
	t.Parallel()
	disk := crashfs.New()
	st := openTest(t, Config{FS: disk, MemTableBytes: 256 << 10})
	want := make(map[string]string)
	for i := range 100 {
		key, value := fmt.Sprintf("%06d", i), fmt.Sprint("value ", i)
		require.NoError(t, st.DB().Set([]byte(key), []byte(value), nil))
		want[key] = value
	}
	require.NoError(t, st.Flush(context.Background()))
	killed := testkit.ImageOf(t, disk.Clone(), "store")
	require.NoError(t, st.Close())

	readers := map[string]func(disk *crashfs.Disk, name string) (map[string]string, error){
		"store": func(disk *crashfs.Disk, _ string) (seen map[string]string, err error) {
			st, shared, err := tryOpen(Config{FS: disk, MemTableBytes: 256 << 10})
			defer shared.Close()
			if err != nil {
				return nil, err
			}
			err = st.Read(func() error { seen, err = readAll(st.DB()); return err })
			return seen, errors.Join(err, st.Close())
		},
		"reading": func(disk *crashfs.Disk, _ string) (map[string]string, error) {
			db, err := OpenForReading(disk, "store")
			if err != nil {
				return nil, err
			}
			seen, err := readAll(db)
			return seen, errors.Join(err, db.Close())
		},
		"table": func(disk *crashfs.Disk, name string) (map[string]string, error) {
			r, err := OpenTable(disk, name)
			if err == nil {
				err = errors.Join(r.ValidateBlockChecksums(), r.Close())
			}
			if err != nil {
				err = fmt.Errorf("%s: %w", name, err) // the caller knows the name
			}
			return want, err
		},
	}
	tables, noticed := 0, 0
	for _, name := range killed.Files {
		if !integrity.IsTable(name) {
			continue
		}
		tables++
		bits := 8 * len(killed.Content[name])
		for bit := bits - footerBits; bit < bits; bit += testkit.Sized(7, 1) {
			for how, read := range readers {
				what := fmt.Sprintf("%s, bit %d of %d, %s", name, bit, bits, how)
				seen, err := read(killed.Flip(t, name, bit), name)
				if err == nil {
					require.Equal(t, want, seen, what)
					continue
				}
				noticed++
				err = Error(err)
				require.ErrorIs(t, err, base.ErrCorrupt, what)
				require.ErrorContains(t, err, path.Base(name), what)
			}
		}
	}
	require.NotZero(t, tables)
	require.Greater(t, noticed, footerBits/testkit.Sized(7, 1))
}

func readAll(db *pebble.DB) (map[string]string, error) {
	it, err := db.NewIter(nil)
	if err != nil {
		return nil, err
	}
	seen := make(map[string]string)
	for valid := it.First(); valid; valid = it.Next() {
		seen[string(it.Key())] = string(it.Value())
	}
	return seen, errors.Join(it.Error(), it.Close())
}
