package fsck

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/integrity"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/platform"
	"codeq/internal/store"
)

// A repair writes a new store from the readable entries of the old one, seals it, and then puts it
// in the place of the old one. If the seal of the old store tells which bit of a file is wrong,
// that bit is corrected in a copy: when nothing else is wrong the copy is the new store, and
// nothing is lost; otherwise the new one is written from the readable entries of the copy.
//
//	shard-NNN.corrected  the copy with corrected bits
//	shard-NNN.gathered   the content of all tables and logs of a store that cannot be opened
//	shard-NNN.rebuilt    being written; complete if it is sealed
//	shard-NNN            renamed to shard-NNN.damaged-N, then replaced by it
//
// A crash between the two renames leaves a shard without a store, and a complete new one:
// FinishRepair renames it.
const (
	correctedSuffix = ".corrected"
	gatheredSuffix  = ".gathered"
	rebuiltSuffix   = ".rebuilt"
	damagedSuffix   = ".damaged-"
)

// rebuildShard writes a new store for a shard, and returns the name under which the old one is
// kept.
func rebuildShard(d *manifest.Directory, rules *Rules, index int) (kept string, repeat int, err error) {
	dir := manifest.ShardDir(d.FS, d.Path, index)
	if repeat, err = writeRebuilt(d, rules, index, dir); err != nil {
		return "", 0, err
	}
	if err := platform.SyncDirectory(d.FS, d.Path); err != nil {
		return "", 0, err
	}
	for n := 1; ; n++ {
		kept = fmt.Sprint(d.FS.PathBase(dir), damagedSuffix, n)
		if _, err := d.FS.Stat(d.FS.PathJoin(d.Path, kept)); errors.Is(err, fs.ErrNotExist) {
			break
		} else if err != nil {
			return "", 0, err
		}
	}
	if err := d.FS.Rename(dir, d.FS.PathJoin(d.Path, kept)); err != nil {
		return "", 0, err
	}
	if err := platform.SyncDirectory(d.FS, d.Path); err != nil {
		return "", 0, err
	}
	return kept, repeat, FinishRepair(d.FS, d.Path, index)
}

// writeRebuilt writes the new store of a shard.
func writeRebuilt(d *manifest.Directory, rules *Rules, index int, dir string) (repeat int, err error) {
	rebuilt, corrected := dir+rebuiltSuffix, dir+correctedSuffix
	if err := errors.Join(d.FS.RemoveAll(rebuilt), d.FS.RemoveAll(corrected)); err != nil {
		return 0, err
	}
	ok, err := integrity.Correct(d.FS, dir, corrected)
	if err != nil {
		return 0, err
	}
	from := dir
	if ok {
		if sound, err := isSound(d, rules, index, corrected); err != nil {
			return 0, err
		} else if sound {
			return 0, d.FS.Rename(corrected, rebuilt)
		}
		from = corrected
	}
	if repeat, err = buildStore(d, rules, index, from, rebuilt, dir+gatheredSuffix); err == nil {
		err = integrity.Seal(d.FS, rebuilt)
	}
	return repeat, errors.Join(err, d.FS.RemoveAll(corrected), d.FS.RemoveAll(dir+gatheredSuffix))
}

// isSound reports whether nothing is wrong with the store of a shard in a directory.
func isSound(d *manifest.Directory, rules *Rules, index int, dir string) (bool, error) {
	v := verifier{Directory: d, rules: rules, report: new(Report)}
	_, err := v.content(index, dir)
	return len(v.report.Problems) == 0, err
}

// FinishRepair renames a rebuilt store to its final name, if no store has that name.
func FinishRepair(fsys vfs.FS, path string, index int) error {
	dir := manifest.ShardDir(fsys, path, index)
	from, err := StoreDir(fsys, path, index)
	if err != nil || from == dir {
		return err
	}
	if err := fsys.Rename(from, dir); err != nil {
		return err
	}
	return platform.SyncDirectory(fsys, path)
}

// StoreDir returns the directory of a shard's store: the rebuilt one, if a repair was interrupted
// between the two renames.
func StoreDir(fsys vfs.FS, path string, index int) (string, error) {
	dir := manifest.ShardDir(fsys, path, index)
	if _, err := fsys.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		return dir, err
	}
	if _, err := fsys.Stat(dir + rebuiltSuffix); errors.Is(err, fs.ErrNotExist) {
		return dir, nil
	} else if err != nil {
		return dir, err
	}
	sealed, err := integrity.Check(fsys, dir+rebuiltSuffix)
	if err != nil || !sealed {
		return dir, err
	}
	return dir + rebuiltSuffix, nil
}

// buildStore writes a store from the readable entries of another one. If that cannot be opened
// because a file is missing or cut short, the content of its files is gathered first; repeat is
// then how many tasks may be delivered again.
func buildStore(d *manifest.Directory, rules *Rules, index int, from, to, gathered string) (repeat int, err error) {
	old, err := store.OpenForReading(d.FS, from)
	if err != nil && store.IsIOError(err) {
		return 0, err
	}
	whole := err == nil
	if !whole {
		if old, err = gatherStore(d.FS, from, gathered); err != nil {
			return 0, err
		}
	}
	defer func() { err = errors.Join(err, old.Close()) }()
	readable, err := newSalvage(old)
	if err != nil {
		return 0, err
	}
	if !whole { // anything may be missing
		for prefix := range 256 {
			readable.gaps[byte(prefix)] = true
		}
	}
	b, err := derive(d, rules, index, readable, to)
	if !whole && err == nil {
		for _, t := range b.tasks {
			if !t.ended() {
				repeat++
			}
		}
	}
	return repeat, err
}

// derive writes the store of a shard from the readable entries of another one.
func derive(d *manifest.Directory, rules *Rules, index int, old *salvage, to string) (*rebuilder, error) {
	st, err := store.NewScratch(d.FS, to, scratchMemTable)
	if err != nil {
		return nil, err
	}
	b := &rebuilder{
		rules: rules, old: old, db: st.DB(), batch: st.DB().NewBatch(), index: index, shards: d.Shards,
		tasks: make(map[taskID]*rebuiltTask), queues: make(map[uint32]string), lanes: make(map[uint32]keys.LaneValue),
		wakes: make(map[wakeKey]byte), sent: make(map[uint32]uint64), latest: make(map[string]uint64),
		told: make(map[taskID]bool), leaving: make(map[taskID]bool),
	}
	err = b.rebuild(d.Identity(index))
	if err == nil { // on a full disk, the flush would wait for ever
		err = st.Flush()
	}
	return b, errors.Join(err, st.Close())
}

// scratchMemTable is the size of the memtables of a store that is written once.
const scratchMemTable = 16 << 20

// Derive writes the stores of a directory that has no shards yet. from returns a store with all
// known facts of a shard: records, the catalogue, leases, settings, schedules, holders of
// idempotency keys and turns, ties of tasks, and messages. All else is derived as by a repair, and
// the shards agree with each other. The directory is closed in order then. from is called once for
// each shard, in their order, and its store may be closed when it is called again.
func Derive(d *manifest.Directory, rules *Rules, from func(shard int) (*pebble.DB, error)) error {
	for i := range d.Shards {
		known, err := from(i)
		if err != nil {
			return err
		}
		readable, err := newSalvage(known)
		if err != nil {
			return err
		}
		dir := manifest.ShardDir(d.FS, d.Path, i)
		_, err = derive(d, rules, i, readable, dir)
		if err == nil {
			err = integrity.Seal(d.FS, dir)
		}
		if err != nil {
			return fmt.Errorf("shard %d: %w", i, err)
		}
	}
	d.Differ = true // the next Open makes them agree, if this process dies before agree does
	if err := d.Write(); err != nil {
		return err
	}
	v := verifier{Directory: d, rules: rules, report: new(Report)}
	return errors.Join(v.agree(true), d.End())
}

// gatherStore returns a new store with the entries in the files of one that Pebble cannot open.
func gatherStore(fsys vfs.FS, from, gathered string) (*pebble.DB, error) {
	if err := fsys.RemoveAll(gathered); err != nil {
		return nil, err
	}
	st, err := store.NewScratch(fsys, gathered, scratchMemTable)
	if err != nil {
		return nil, err
	}
	err = gather(fsys, from, st.DB())
	if err == nil {
		err = st.Flush()
	}
	if err != nil {
		return nil, errors.Join(err, st.Close())
	}
	return st.DB(), nil
}
