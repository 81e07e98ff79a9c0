package codeq

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/failstop"
	"codeq/internal/integrity"
	"codeq/internal/keys"
)

// A repair writes a new store from what can be read of the old one, seals it, and
// then lets it take the place of the old one. If its seal tells which bit of a file is wrong, a
// copy has that bit put right: when nothing else is wrong the copy is the new store, and nothing is lost; or else
// the new one is written from what can be read of the copy.
//
//	shard-NNN.corrected  the copy with bits put right
//	shard-NNN.rebuilt    being written; complete if it is sealed
//	shard-NNN            renamed to shard-NNN.damaged-N, then replaced by it
//
// A crash between the two renames leaves a shard without a store, and a complete new
// one: finishRepair.
const (
	correctedSuffix = ".corrected"
	rebuiltSuffix   = ".rebuilt"
	damagedSuffix   = ".damaged-"
)

// rebuildShard builds the store of a shard anew, and returns the name under
// which the old one is kept.
func rebuildShard(d *directory, index int) (kept string, err error) {
	dir := shardDir(d.fs, d.path, index)
	if err := writeRebuilt(d, index, dir); err != nil {
		return "", err
	}
	if err := syncDirectory(d.fs, d.path); err != nil {
		return "", err
	}
	for n := 1; ; n++ {
		kept = fmt.Sprint(d.fs.PathBase(dir), damagedSuffix, n)
		if _, err := d.fs.Stat(d.fs.PathJoin(d.path, kept)); errors.Is(err, fs.ErrNotExist) {
			break
		} else if err != nil {
			return "", err
		}
	}
	if err := d.fs.Rename(dir, d.fs.PathJoin(d.path, kept)); err != nil {
		return "", err
	}
	if err := syncDirectory(d.fs, d.path); err != nil {
		return "", err
	}
	return kept, finishRepair(d.fs, d.path, index)
}

// writeRebuilt writes the new store of a shard.
func writeRebuilt(d *directory, index int, dir string) error {
	rebuilt, corrected := dir+rebuiltSuffix, dir+correctedSuffix
	if err := errors.Join(d.fs.RemoveAll(rebuilt), d.fs.RemoveAll(corrected)); err != nil {
		return err
	}
	ok, err := integrity.Correct(d.fs, dir, corrected)
	if err != nil {
		return err
	}
	from := dir
	if ok {
		if sound, err := isSound(d, index, corrected); err != nil {
			return err
		} else if sound {
			return d.fs.Rename(corrected, rebuilt)
		}
		from = corrected
	}
	if err = buildStore(d, index, from, rebuilt); err == nil {
		err = integrity.Seal(d.fs, rebuilt)
	}
	return errors.Join(err, d.fs.RemoveAll(corrected))
}

// isSound reports whether nothing is wrong with the store of a shard in a directory.
func isSound(d *directory, index int, dir string) (bool, error) {
	v := verifier{directory: d, report: new(VerifyReport)}
	_, err := v.content(index, dir)
	return len(v.report.Problems) == 0, err
}

// finishRepair puts a store that was built anew in its place, if that is empty.
func finishRepair(fsys vfs.FS, path string, index int) error {
	dir := shardDir(fsys, path, index)
	if _, err := fsys.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if _, err := fsys.Stat(dir + rebuiltSuffix); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	sealed, err := integrity.Check(fsys, dir+rebuiltSuffix)
	if err != nil || !sealed {
		return err
	}
	if err := fsys.Rename(dir+rebuiltSuffix, dir); err != nil {
		return err
	}
	return syncDirectory(fsys, path)
}

func buildStore(d *directory, index int, from, to string) (err error) {
	old, err := openForReading(d.fs, from)
	if err != nil {
		if !isIOError(err) {
			err = fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		return err
	}
	defer func() { err = errors.Join(err, old.Close()) }()
	readable, err := newSalvage(old)
	if err != nil {
		return err
	}
	latch := failstop.New(slog.New(slog.DiscardHandler), "store")
	db, err := latch.Open(to, &pebble.Options{
		FS: d.fs, DisableWAL: true, FormatMajorVersion: storeFormat, MemTableSize: 16 << 20,
	})
	if err != nil {
		return err
	}
	b := rebuilder{
		old: readable, db: db, batch: db.NewBatch(), index: index, shards: d.Shards,
		tasks: make(map[ID]*rebuiltTask), queues: make(map[uint32]string), lanes: make(map[uint32]keys.LaneValue),
		wakes: make(map[wakeKey]byte), sent: make(map[uint32]uint64),
	}
	err = b.rebuild(d.identity(index))
	if err == nil { // of a disk that is full, the flush would wait for ever
		st := &store{db: db, latch: latch}
		err = st.flush(context.Background())
	}
	return errors.Join(err, latch.Close(db))
}
