package codeq

import (
	"fmt"

	"codeq/internal/fsck"
	"codeq/internal/inspect"
	"codeq/internal/offline"
	"codeq/internal/platform"
)

// VerifyOptions are the options of [Verify]. With a nil *VerifyOptions Verify changes nothing.
type VerifyOptions struct {
	// Repair repairs every shard with a problem. If it was closed in order, and one bit is wrong in
	// its logs or its MANIFEST, that bit is corrected. Else it is rebuilt from the readable records
	// of tasks; lease records, settings, schedules, idempotency keys and messages between shards
	// are copied as far as they are readable. The damaged store is kept as shard-NNN.damaged-N:
	// remove it when you want. A node's directory is not repaired: see [Queue.ReplaceNode].
	//
	// A task without its record is gone; without its lease record it is delivered again, for no
	// attempt. Without the name of its queue or tenant it gets one that begins with "recovered-",
	// reported if that contradicts its Group or LimitKey. An idempotency key lost with its task's
	// end is free. If the end of a log or MANIFEST is lost, so are the last changes: new tasks are
	// gone, ended ones delivered again. If a table, a MANIFEST, a marker or OPTIONS is missing or
	// cut short, ended tasks may be back: see [ShardReport.MayRepeat].
	Repair     bool
	AcceptCopy bool // accepts a directory that [ErrCopied] would refuse: see [Options.AcceptCopy]

	private inspect.Private
}

// VerifyReport is the result of [Verify].
type VerifyReport struct {
	Node     string        // name of the cluster node; "": not a node of a cluster
	Shards   []ShardReport // by the number of the shard
	Problems []Problem     // of all shards, and of the other data of a node
}

// OK reports whether there is no problem, or all have been repaired.
func (r *VerifyReport) OK() bool {
	for _, p := range r.Problems {
		if !p.Repaired {
			return false
		}
	}
	return true
}

// ShardReport describes one shard; after a repair, the new store.
type ShardReport struct {
	// Sealed: closed in order. Else damage at the end of the newest log looks like a crash.
	Sealed bool
	Files  int
	Bytes  int64
	Tasks  Counts // those that can be read
	Kept   string // where Repair put the damaged store, in the queue's directory; "": no repair
	// MayRepeat is how many ended tasks may be delivered again: 0, or, if a file of the repaired
	// shard was missing or cut short, all that have not ended as far as is known.
	MayRepeat int
	// NotUTF8 are tasks of builds before the first release with names, keys or headers that are not
	// UTF-8. They are no damage, but a program on another node sees U+FFFD in place of such bytes.
	NotUTF8 []ID
}

// Problem is one case of damage or contradiction that [Verify] has found.
type Problem struct {
	Shard      int    // -1: not in a shard
	File       string // in the queue's directory; "": stored values contradict each other
	Text       string
	Repairable bool // by VerifyOptions.Repair, which loses what cannot be read
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

// Verify reads the directory of a closed queue, and reports damage and contradictions: of the seals
// that [Queue.Close] leaves, the checksum of every block, the order of Pebble's levels, of records,
// index, counters, leases and all other entries, and, unless it is a node's, between shards, which
// [Open] corrects after a power loss. Without Repair it changes nothing. It reads everything two or
// three times, shard by shard, with 300 bytes of memory a task, a repair twice that.
//
// Problems in the report are no error; [ErrCorrupt] says that the manifest is damaged. A repair is
// all or nothing for each shard; the next starts again, and [Open] finishes a complete one.
//
// Errors: [ErrInvalid] (dir is ""), [ErrNotQueue], [ErrLocked], [ErrFormat], [ErrCopied],
// [ErrCorrupt], and those of the file system.
func Verify(dir string, opts *VerifyOptions) (_ *VerifyReport, err error) {
	defer public(&err)
	if err := checkDir("Verify dir", dir); err != nil {
		return nil, err
	}
	o := VerifyOptions{private: inspect.Private{FS: platform.FS}}
	if opts != nil {
		o.Repair, o.AcceptCopy = opts.Repair, opts.AcceptCopy
		if opts.private.FS != nil {
			o.private.FS = opts.private.FS
		}
	}
	found, err := fsck.Verify(o.private.FS, dir, offline.Rules, o.Repair, o.AcceptCopy)
	if err != nil {
		return nil, err
	}
	return verifyReport(found), nil
}

func verifyReport(found *fsck.Report) *VerifyReport {
	r := &VerifyReport{Node: found.Node}
	for _, s := range found.Shards {
		of := ShardReport{Sealed: s.Sealed, Files: s.Files, Bytes: s.Bytes, Tasks: Counts(s.Tasks), Kept: s.Kept, MayRepeat: s.MayRepeat}
		for _, id := range s.NotUTF8 {
			of.NotUTF8 = append(of.NotUTF8, id)
		}
		r.Shards = append(r.Shards, of)
	}
	for _, p := range found.Problems {
		r.Problems = append(r.Problems, Problem(p))
	}
	return r
}
