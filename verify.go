package codeq

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/engine"
	"codeq/internal/fsck"
	"codeq/internal/manifest"
)

// VerifyOptions of Verify. A nil *VerifyOptions changes nothing.
type VerifyOptions struct {
	// Repair has every shard with a problem repaired. If it was closed in order, and one bit is
	// wrong in its logs or in its MANIFEST, that is put right. If more is wrong it is built anew,
	// from the records of tasks that can be read then. What follows from these is derived: index
	// entries, counters, sizes of buckets, turns of groups, and what frees idempotency keys; lease
	// records, settings, schedules, idempotency keys and messages between shards are taken over as
	// far as they can be read. The damaged store is kept beside the new one, as
	// shard-NNN.damaged-N: remove it when it is of no use any more.
	//
	// What cannot be read is lost. A task whose record is lost is gone; one whose lease record is
	// lost is delivered again, and the attempt not counted; tasks of a queue or a tenant whose name
	// is lost have one that begins with "recovered-", and if they have a Group or a LimitKey that
	// contradicts it, which is reported; an idempotency key that is lost with its task's end is
	// free; and with the end of a log or of a MANIFEST the last that happened is lost: tasks that
	// were produced then are gone, and those that ended then are delivered again. If a table, a
	// MANIFEST, a marker or OPTIONS is missing or cut short, tasks that have ended may be back: see
	// ShardReport.MayRepeat. The directory of a node of a cluster is not repaired, since replicas
	// are equal: see ReplaceNode.
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
	// Kept is where Repair has put the damaged store, in the queue's directory. "": it was not
	// repaired.
	Kept string
	// MayRepeat is how many tasks have not ended in a shard of which a file was missing or cut
	// short when it was repaired: of them, some may have ended, and are delivered again.
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

// Verify reads all that is stored in the directory of a queue that nobody has open, and reports
// what is damaged or contradicts itself: the seals that Close leaves, the checksum of every block,
// the order of Pebble's levels, and then whether records, index, counters, leases and all else
// agree. Without Repair it changes nothing. It reads everything two or three times, a shard after
// the other, and takes some 300 bytes of memory for each task of the shard, a repair twice as much.
//
// The error says why the directory could not be verified: [ErrNotQueue], [ErrLocked], [ErrFormat],
// [ErrCopied], [ErrCorrupt] if the manifest of the queue is damaged, or one of the file system.
// Problems are no error.
//
// A repair is all or nothing for each shard, whenever it is interrupted; the next one begins anew,
// and Open finishes one that was complete.
func Verify(dir string, opts *VerifyOptions) (_ *VerifyReport, err error) {
	defer public(&err)
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
	var found *fsck.Report
	if !o.AcceptCopy {
		err = d.RefuseCopy()
	}
	if err == nil {
		found, err = fsck.Verify(d, storedRules, o.Repair)
	}
	if err = errors.Join(err, d.Close()); err != nil {
		return nil, fmt.Errorf("codeq: verify %s: %w", dir, err)
	}
	return verifyReport(d.Node, found), nil
}

func verifyReport(node string, found *fsck.Report) *VerifyReport {
	r := &VerifyReport{Node: node}
	for _, s := range found.Shards {
		r.Shards = append(r.Shards, ShardReport{
			Sealed: s.Sealed, Files: s.Files, Bytes: s.Bytes, Tasks: Counts(s.Tasks), Kept: s.Kept, MayRepeat: s.MayRepeat,
		})
	}
	for _, p := range found.Problems {
		r.Problems = append(r.Problems, Problem(p))
	}
	return r
}

// storedRules say what is good of the stored values that users see.
var storedRules = &fsck.Rules{
	MaxPriority: MaxPriority,
	MaxOnDead:   uint8(RunOnDead),
	Settings: func(value []byte) (version uint64, err error) {
		set, err := engine.ParseSettings(value)
		return set.Version, err
	},
	Schedule: func(key, value []byte) (name string, err error) {
		r, err := engine.ParseRecurring(key, value)
		if err != nil {
			return "", err
		}
		return r.Name, nil
	},
}
