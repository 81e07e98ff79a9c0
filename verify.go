package codeq

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/integrity"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/raftlog"
	"codeq/internal/schema"
	"codeq/internal/snapshot"
	"codeq/internal/store"
)

// VerifyOptions of Verify. A nil *VerifyOptions changes nothing.
type VerifyOptions struct {
	// Repair has every shard with a problem repaired. If it was closed in order, and one bit is wrong in its
	// logs or in its MANIFEST, that is put right. If more is wrong it is built anew, from the records of tasks
	// that can be read then. What follows from these is derived: index entries, counters,
	// sizes of buckets, turns of groups, and what frees idempotency keys; lease
	// records, settings, schedules, idempotency keys and messages between shards are taken over as
	// far as they can be read. The damaged store is kept beside the new one, as
	// shard-NNN.damaged-N: remove it when it is of no use any more.
	//
	// What cannot be read is lost. A task whose record is lost is gone; one whose
	// lease record is lost is delivered again, and the attempt not counted; tasks of a queue or a tenant whose name is
	// lost have one that begins with "recovered-", and if they have a Group or a LimitKey that contradicts it, which is reported; an
	// idempotency key that is lost with its task's end is free; and with the end of a log or of a
	// MANIFEST the last that happened is lost: tasks that were produced then are gone, and those that
	// ended then are delivered again. If a table, a MANIFEST, a marker or OPTIONS is missing or cut short, tasks
	// that have ended may be back: see ShardReport.MayRepeat. The directory of a node of a cluster is not repaired,
	// since replicas are equal: see ReplaceNode.
	Repair bool
	// AcceptCopy verifies a directory that ErrCopied refuses: see Options.AcceptCopy.
	AcceptCopy bool

	fs vfs.FS
}

// VerifyReport is what Verify has found.
type VerifyReport struct {
	Node     string        // of a cluster whose directory it is; "": a queue by itself
	Shards   []ShardReport // in their order
	Problems []Problem     // of all shards, and of what a node has beside them
}

// OK reports whether there is no problem, or none any more.
func (r *VerifyReport) OK() bool {
	for _, p := range r.Problems {
		if !p.Repaired {
			return false
		}
	}
	return true
}

// ShardReport is what Verify has found of a shard; after a repair, of the new store.
type ShardReport struct {
	// Sealed: the store was closed in order, and its logs are known to be whole. In one that a
	// crash has left, damage at the end of the newest log looks like that end.
	Sealed bool
	Files  int
	Bytes  int64
	Tasks  Counts // those that can be read
	// Kept is where Repair has put the damaged store, in the queue's directory.
	// "": it was not repaired.
	Kept string
	// MayRepeat is how many tasks have not ended in a shard of which a file was missing or
	// cut short when it was repaired: of them, some may have ended, and are delivered again.
	MayRepeat int
}

// Problem is one thing that is not as it should be.
type Problem struct {
	Shard      int    // -1: it is not of a shard
	File       string // in the queue's directory; "": what is stored contradicts itself
	Text       string
	Repairable bool // by VerifyOptions.Repair, at the loss of what cannot be read
	Repaired   bool
}

func (p Problem) String() string {
	s := p.Text
	if p.File != "" {
		s = p.File + ": " + s
	}
	if p.Shard >= 0 {
		s = fmt.Sprintf("shard %d: %s", p.Shard, s)
	}
	return s
}

// Verify reads all that is stored in the directory of a queue that nobody has
// open, and reports what is damaged or contradicts itself: the seals that Close
// leaves, the checksum of every block, the order of Pebble's levels, and then whether
// records, index, counters, leases and all else agree. Without Repair it changes
// nothing. It reads everything two or three times, a shard after the other, and takes some 300 bytes
// of memory for each task of the shard, a repair twice as much.
//
// The error says why the directory could not be verified: ErrNotQueue,
// ErrLocked, ErrFormat, ErrCopied, ErrCorrupt if the manifest of the queue is damaged, or
// one of the file system. Problems are no error.
//
// A repair is all or nothing for each shard, whenever it is interrupted; the next one begins
// anew, and Open finishes one that was complete.
func Verify(dir string, opts *VerifyOptions) (*VerifyReport, error) {
	o := VerifyOptions{fs: vfs.Default}
	if opts != nil {
		o.Repair, o.AcceptCopy = opts.Repair, opts.AcceptCopy
		if opts.fs != nil {
			o.fs = opts.fs
		}
	}
	m, err := manifest.Read(o.fs, dir)
	if err == nil && m == nil {
		err = fmt.Errorf("%w: there is none", ErrNotQueue)
	}
	if err != nil {
		return nil, fmt.Errorf("codeq: verify %s: %w", dir, err)
	}
	d, err := manifest.Open(o.fs, dir, manifest.Want{Shards: m.Shards, Node: m.Node})
	if err != nil {
		return nil, err
	}
	v := verifier{Directory: d, report: &VerifyReport{Node: d.Node}}
	if !o.AcceptCopy {
		err = d.RefuseCopy()
	}
	if err == nil {
		err = v.verify(o.Repair)
	}
	if err = errors.Join(err, d.Close()); err != nil {
		return nil, fmt.Errorf("codeq: verify %s: %w", dir, err)
	}
	return v.report, nil
}

// verifier is a Verify under way.
type verifier struct {
	*manifest.Directory
	report *VerifyReport
}

func (v *verifier) verify(repair bool) error {
	if v.Creating { // Open had not returned yet: nothing was acknowledged
		return nil
	}
	for i := range v.Shards {
		if repair {
			if err := finishRepair(v.FS, v.Path, i); err != nil {
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
			case errors.Is(err, ErrCorrupt):
				v.found(Problem{Shard: i, Text: "cannot be repaired: " + err.Error()})
			default:
				return fmt.Errorf("repair shard %d: %w", i, err)
			}
		}
		v.report.Shards = append(v.report.Shards, r)
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

// repair builds a shard anew, and verifies the result.
func (v *verifier) repair(index int) (r ShardReport, err error) {
	if err := v.Begin(); err != nil {
		return r, err
	}
	kept, repeat, err := rebuildShard(v.Directory, index)
	if err != nil {
		return r, err
	}
	r, err = v.shard(index)
	r.Kept, r.MayRepeat = kept, repeat
	return r, err
}

func (v *verifier) found(p Problem) { v.report.Problems = append(v.report.Problems, p) }

// shard verifies a shard. Its error is that it could not.
func (v *verifier) shard(index int) (r ShardReport, err error) {
	dir := manifest.ShardDir(v.FS, v.Path, index)
	if _, err := v.FS.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		_, err := v.FS.Stat(dir + rebuiltSuffix)
		v.found(Problem{Shard: index, File: v.FS.PathBase(dir), Text: "missing", Repairable: err == nil})
		return r, nil
	}
	return v.content(index, dir)
}

// content verifies the store of a shard in a directory.
func (v *verifier) content(index int, dir string) (r ShardReport, err error) {
	begin, repairable := len(v.report.Problems), v.Node == ""
	db, err := v.store(index, dir, repairable, &r)
	if db == nil || err != nil {
		return r, err
	}
	view := newView(&replica{index: index}, db.NewSnapshot())
	view.replica.mu.RLock()
	err = store.Protect(func() error {
		defer view.close()
		c := view.inspect(index, v.Shards)
		r.Tasks = Counts(c.tasks)
		if len(v.report.Problems) > begin { // what follows from it says nothing more
			return nil
		}
		for _, err := range c.errs {
			v.found(Problem{Shard: index, Text: err.Error(), Repairable: repairable})
		}
		if err := v.identity(index, view.snap); err != nil {
			v.found(Problem{Shard: index, Text: err.Error(), Repairable: repairable})
		}
		return nil
	})
	if err != nil {
		v.found(Problem{Shard: index, Text: err.Error(), Repairable: repairable})
	}
	return r, db.Close()
}

// identity makes sure that a store is the shard, as Open does.
func (v *verifier) identity(index int, r pebble.Reader) error {
	got, err := schema.Lookup(r, []byte{keys.Meta})
	if err != nil {
		return err
	}
	if v.Node == "" {
		_, err = v.CheckIdentity(index, got)
	} else if got != nil { // it has been led
		_, err = manifest.CheckReplicaIdentity(index, v.Shards, got)
	}
	return err
}

// store verifies a Pebble store by its files, and returns it open for reading;
// nil if it cannot be opened.
func (v *verifier) store(index int, dir string, repairable bool, r *ShardReport) (*pebble.DB, error) {
	base := v.FS.PathBase(dir)
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
		v.found(Problem{Shard: index, File: v.FS.PathJoin(base, damage.Name), Text: damage.What, Repairable: repairable})
	} else if err != nil {
		return nil, err
	}
	db, err := store.OpenForReading(v.FS, dir)
	if err != nil {
		if store.IsIOError(err) {
			return nil, err
		}
		v.found(Problem{Shard: index, File: base, Text: "cannot be opened: " + err.Error(), Repairable: repairable})
		return nil, nil
	}
	if err := v.tables(index, dir, db, repairable); err != nil {
		return nil, errors.Join(err, db.Close())
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
			name := t.BackingSSTNum.String() + store.TableSuffix
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

// logs verifies what a node of a cluster has beside the stores of its shards.
func (v *verifier) logs() error {
	dir := v.FS.PathJoin(v.Path, manifest.RaftDir)
	db, err := v.store(-1, dir, false, new(ShardReport))
	if err != nil {
		return err
	}
	if db != nil {
		err := store.Protect(func() error { return raftlog.Check(db) })
		if err != nil {
			v.found(Problem{Shard: -1, File: manifest.RaftDir, Text: err.Error()})
		}
		if err := db.Close(); err != nil {
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
