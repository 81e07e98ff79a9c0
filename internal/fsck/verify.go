// Package fsck verifies and repairs the stored data of a closed queue: the files of its stores, and
// contradictions in their content. A repair writes a new store in place of a damaged one.
package fsck

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/convert"
	"codeq/internal/integrity"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/raftlog"
	"codeq/internal/snapshot"
	"codeq/internal/store"
)

// Rules check the stored values that this package cannot read.
type Rules struct {
	// Settings returns the version of the stored settings of a queue. It may keep value.
	Settings func(value []byte) (version uint64, err error)
	// Schedule returns the name of a stored schedule.
	Schedule func(key, value []byte) (name string, err error)
}

// Report is what Verify has found.
type Report struct {
	Node     string  // name of the cluster node; "": not a node of a cluster
	Shards   []Shard // in their order
	Problems []Problem
}

// Shard is what Verify has found of a shard; after a repair, in the new store.
type Shard struct {
	Sealed    bool // it was closed in order
	Files     int
	Bytes     int64
	Tasks     keys.Counts // that can be read
	Kept      string      // the damaged store, in the queue's directory; "": it was not repaired
	MayRepeat int         // tasks that may have ended and may be delivered again
	NotUTF8   []keys.ID   // tasks with names, keys or headers that are not UTF-8
}

// Problem is one fault that was found.
type Problem struct {
	Shard      int    // -1: it concerns no shard
	File       string // in the queue's directory; "": the stored data contradict themselves
	Text       string
	Repairable bool
	Repaired   bool
}

// Verify reads everything in the directory of a queue. With repair it repairs the shards with
// problems; with copied it accepts a directory that was copied while it was open. The error says
// why the directory could not be read.
func Verify(fsys vfs.FS, dir string, rules *Rules, repair, copied bool) (*Report, error) {
	m, err := manifest.Read(fsys, dir)
	if err == nil && m == nil {
		err = manifest.ErrNone
	}
	if err != nil {
		return nil, fmt.Errorf("codeq: verify %s: %w", dir, manifest.Permitted(err))
	}
	d, err := open(fsys, dir, m, repair)
	if err != nil {
		return nil, err
	}
	report := &Report{Node: m.Node}
	if !copied {
		err = d.RefuseCopy()
	}
	if err == nil {
		v := verifier{Directory: d, rules: rules, report: report}
		err = v.verify(repair)
	}
	if err = errors.Join(err, d.Close()); err != nil {
		return nil, fmt.Errorf("codeq: verify %s: %w", dir, err)
	}
	return report, nil
}

// open locks a directory: exclusively for a repair, otherwise against changes.
func open(fsys vfs.FS, dir string, m *manifest.Manifest, repair bool) (*manifest.Directory, error) {
	switch {
	case repair:
		return manifest.Open(fsys, dir, manifest.Want{Shards: m.Shards, Node: m.Node})
	case m.Creating: // which is no queue yet
		return manifest.OpenUnfinished(fsys, dir)
	}
	return manifest.OpenReadOnly(fsys, dir)
}

// verifier is a running Verify, of a directory that is locked.
type verifier struct {
	*manifest.Directory
	rules  *Rules
	report *Report
}

func (v *verifier) verify(repair bool) error {
	if v.Creating { // Open did not return: nothing was acknowledged
		return nil
	}
	for i := range v.Shards {
		if repair {
			if err := FinishRepair(v.FS, v.Path, i); err != nil {
				return err
			}
		}
		begin := len(v.report.Problems)
		r, err := v.shard(i)
		if err != nil {
			return err
		}
		if found := v.report.Problems[begin:]; repair && allRepairable(found) {
			repaired, err := v.repair(i)
			switch {
			case err == nil:
				r = repaired
				for j := range found {
					v.report.Problems[begin+j].Repaired = true
				}
			case errors.Is(err, base.ErrCorrupt):
				v.found(Problem{Shard: i, Text: "cannot be repaired: " + err.Error()})
			default:
				return fmt.Errorf("repair shard %d: %w", i, err)
			}
		}
		v.report.Shards = append(v.report.Shards, r)
	}
	if v.Node != "" && v.Shards > 1 { // its replicas may have states of different times
		return v.logs()
	}
	if err := v.agree(repair && v.Node == ""); err != nil {
		return err
	}
	if v.Node != "" {
		return v.logs()
	}
	if repair && v.Format == manifest.Format {
		return v.End()
	}
	return nil
}

func allRepairable(found []Problem) bool {
	for _, p := range found {
		if !p.Repairable {
			return false
		}
	}
	return len(found) > 0
}

// repair rebuilds a shard, and verifies the result. The next Open makes the shards agree, if agree
// does not.
func (v *verifier) repair(index int) (r Shard, err error) {
	v.Differ = true
	if err := v.Begin(); err != nil {
		return r, err
	}
	kept, repeat, err := rebuildShard(v.Directory, v.rules, index)
	if err != nil {
		return r, err
	}
	r, err = v.shard(index)
	r.Kept, r.MayRepeat = kept, repeat
	return r, err
}

// agree verifies that the shards agree with each other, if each of them is sound by itself.
func (v *verifier) agree(repair bool) error {
	if slices.ContainsFunc(v.report.Problems, func(p Problem) bool { return !p.Repaired }) {
		return nil
	}
	found, err := v.contradictions()
	if err == nil && repair && len(found) > 0 {
		err = v.reconcile()
	}
	if err != nil {
		return err
	}
	for _, c := range found {
		v.found(Problem{Shard: c.Shard, Text: c.Text, Repairable: v.Node == "", Repaired: repair})
	}
	if repair {
		return v.Agree()
	}
	return nil
}

// contradictions returns those between the shards.
func (v *verifier) contradictions() (found []convert.Contradiction, err error) {
	shards := make([]pebble.Reader, v.Shards)
	for i := range shards {
		db, openErr := store.OpenForReading(v.FS, manifest.ShardDir(v.FS, v.Path, i))
		if openErr != nil {
			return nil, openErr
		}
		defer func() { err = errors.Join(err, db.Close()) }()
		shards[i] = db
	}
	return convert.Crosscheck(shards)
}

// reconcile makes the shards agree with each other, as Open does after a power loss.
func (v *verifier) reconcile() (err error) {
	if err := v.Begin(); err != nil {
		return err
	}
	caches := store.NewCaches(8<<20, reconcileMemTable, v.Shards)
	defer caches.Close()
	var stores []*store.Store
	for i := range v.Shards {
		st, err := store.Open(manifest.ShardDir(v.FS, v.Path, i), store.Config{
			FS: v.FS, Log: slog.New(slog.DiscardHandler), Durability: store.Disk, Format: manifest.PebbleFormat(v.Format),
			MemTableBytes: reconcileMemTable, ReclaimFrom: store.ReclaimFrom, Still: true,
		}, caches, false)
		if err != nil {
			return errors.Join(err, closeAll(stores))
		}
		stores = append(stores, st)
	}
	err = convert.Reconcile(stores, true, slog.New(slog.DiscardHandler))
	return errors.Join(err, closeAll(stores))
}

const reconcileMemTable = 4 << 20

func closeAll(stores []*store.Store) (err error) {
	for _, st := range stores {
		err = errors.Join(err, st.Close())
	}
	return err
}

func (v *verifier) found(p Problem) { v.report.Problems = append(v.report.Problems, p) }

// shard verifies a shard. The error says why it could not.
func (v *verifier) shard(index int) (r Shard, err error) {
	dir := manifest.ShardDir(v.FS, v.Path, index)
	if _, err := v.FS.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		_, err := v.FS.Stat(dir + rebuiltSuffix)
		v.found(Problem{Shard: index, File: v.FS.PathBase(dir), Text: "missing", Repairable: err == nil})
		return r, nil
	}
	return v.content(index, dir)
}

// content verifies the store of a shard in a directory.
func (v *verifier) content(index int, dir string) (r Shard, err error) {
	begin, repairable := len(v.report.Problems), v.Node == ""
	db, err := v.store(index, dir, repairable, &r)
	if db == nil || err != nil {
		return r, err
	}
	err = store.Protect(func() error {
		c := inspect(db, v.rules, index, v.Shards)
		r.Tasks, r.NotUTF8 = c.tasks, c.notUTF8
		if len(v.report.Problems) > begin { // its contradictions follow from that
			return nil
		}
		for _, err := range c.errs {
			v.found(Problem{Shard: index, Text: err.Error(), Repairable: repairable})
		}
		if err := v.identity(index, db); err != nil {
			v.found(Problem{Shard: index, Text: err.Error(), Repairable: repairable})
		}
		return nil
	})
	if err != nil {
		v.found(Problem{Shard: index, Text: err.Error(), Repairable: repairable})
	}
	return r, v.close(index, dir, db, repairable)
}

// close closes a store. Pebble panics if it has lost an iterator over damaged data: then a file
// stays open.
func (v *verifier) close(index int, dir string, db *pebble.DB, repairable bool) error {
	err := store.Protect(db.Close)
	if errors.Is(err, base.ErrCorrupt) {
		v.found(Problem{Shard: index, File: v.FS.PathBase(dir), Text: "cannot be closed: " + err.Error(), Repairable: repairable})
		return nil
	}
	return err
}

// identity checks that a store belongs to the shard, as Open does.
func (v *verifier) identity(index int, r pebble.Reader) error {
	got, err := store.Lookup(r, []byte{keys.Meta})
	if err != nil {
		return err
	}
	return v.CheckStored(index, got)
}

// store verifies the files of a Pebble store, and returns it open for reading; nil if it cannot be
// opened.
func (v *verifier) store(index int, dir string, repairable bool, r *Shard) (*pebble.DB, error) {
	name := v.FS.PathBase(dir)
	names, err := v.FS.List(dir)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		info, err := v.FS.Stat(v.FS.PathJoin(dir, name))
		if err != nil {
			return nil, err
		}
		r.Files++
		r.Bytes += info.Size()
	}
	damage := (*integrity.Error)(nil)
	if r.Sealed, err = integrity.Check(v.FS, dir); errors.As(err, &damage) {
		v.found(Problem{Shard: index, File: v.FS.PathJoin(name, damage.Name), Text: damage.What, Repairable: repairable})
	} else if err != nil {
		return nil, err
	}
	db, err := store.OpenForReading(v.FS, dir)
	if err != nil {
		if store.IsIOError(err) {
			return nil, err
		}
		v.found(Problem{Shard: index, File: name, Text: "cannot be opened: " + err.Error(), Repairable: repairable})
		return nil, nil
	}
	if err := v.tables(index, dir, db, repairable); err != nil {
		return nil, errors.Join(err, v.close(index, dir, db, repairable))
	}
	return db, nil
}

// tables reads every block of every table, and the levels.
func (v *verifier) tables(index int, dir string, db *pebble.DB, repairable bool) error {
	levels, err := db.SSTables()
	if err != nil {
		return err
	}
	whole := true
	for _, level := range levels {
		for i := range level {
			t := &level[i]
			name := t.BackingSSTNum.String() + integrity.TableSuffix
			err := store.Protect(func() error { return checkTable(v.FS, v.FS.PathJoin(dir, name)) })
			if err == nil {
				continue
			}
			if store.IsIOError(err) {
				return err
			}
			whole = false
			v.found(Problem{
				Shard: index, File: v.FS.PathJoin(v.FS.PathBase(dir), name), Repairable: repairable,
				Text: fmt.Sprintf("keys between %x and %x cannot be read: %v", t.Smallest.UserKey, t.Largest.UserKey, err),
			})
		}
	}
	if !whole {
		return nil
	}
	if err := store.Protect(func() error { return db.CheckLevels(nil) }); err != nil {
		v.found(Problem{Shard: index, File: v.FS.PathBase(dir), Text: err.Error(), Repairable: repairable})
	}
	return nil
}

func checkTable(fsys vfs.FS, path string) error {
	r, err := store.OpenTable(fsys, path)
	if err != nil {
		return err
	}
	return errors.Join(r.ValidateBlockChecksums(), r.Close())
}

// logs verifies the files of a cluster node beside its shards.
func (v *verifier) logs() error {
	dir := v.FS.PathJoin(v.Path, manifest.RaftDir)
	db, err := v.store(-1, dir, false, new(Shard))
	if err != nil {
		return err
	}
	if db != nil {
		err := store.Protect(func() error { return raftlog.Check(db) })
		if err != nil {
			v.found(Problem{Shard: -1, File: manifest.RaftDir, Text: err.Error()})
		}
		if err := v.close(-1, dir, db, false); err != nil {
			return err
		}
	}
	if err := raftlog.CheckStable(v.FS, v.FS.PathJoin(v.Path, manifest.VotesFile)); err != nil {
		v.found(Problem{Shard: -1, File: manifest.VotesFile, Text: err.Error()})
	}
	for i := range v.Shards {
		if err := snapshot.Check(v.FS, manifest.MetaDir(v.FS, v.Path, i)); err != nil {
			v.found(Problem{Shard: i, File: filepath.Base(manifest.MetaDir(v.FS, v.Path, i)), Text: err.Error()})
		}
	}
	return nil
}
