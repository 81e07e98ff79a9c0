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
	// Repair repairs every shard with a problem. If the shard was closed in order, and one bit is
	// wrong in its logs or in its MANIFEST, that bit is corrected. If more is wrong, the shard is
	// rebuilt from the records of tasks that can be read. Everything that follows from these is
	// derived: index entries, counters, sizes of buckets, turns of groups, and the entries that
	// free idempotency keys; lease records, settings, schedules, idempotency keys and messages
	// between shards are copied as far as they can be read. The damaged store is kept beside the
	// new one, as shard-NNN.damaged-N: remove it when you do not need it any more.
	//
	// What cannot be read is lost. A task without its record is gone. A task without its lease
	// record is delivered again, and the attempt is not counted. If the name of a queue or a tenant
	// is lost, its tasks get a name that begins with "recovered-"; this is reported if it
	// contradicts their Group or LimitKey. An idempotency key that is lost together with its task's
	// end is free. If the end of a log or of a MANIFEST is lost, so are the last changes: tasks
	// produced then are gone, and tasks that ended then are delivered again. If a table, a
	// MANIFEST, a marker or OPTIONS is missing or cut short, ended tasks may be back: see
	// [ShardReport.MayRepeat]. The directory of a node of a cluster is not repaired, since replicas
	// are equal: see [Queue.ReplaceNode].
	Repair bool
	// AcceptCopy makes [Verify] accept a directory that [ErrCopied] would refuse: see
	// [Options.AcceptCopy].
	AcceptCopy bool

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
	// Sealed: the store was closed in order, and its logs are known to be complete. After a crash,
	// damage at the end of the newest log cannot be told from the end itself.
	Sealed bool
	Files  int
	Bytes  int64
	Tasks  Counts // those that can be read
	// Kept is where Repair has put the damaged store, in the queue's directory. "": the shard was
	// not repaired.
	Kept string
	// MayRepeat is how many tasks may be delivered again although they had ended. It is 0 unless a
	// file of the repaired shard was missing or cut short; then it counts all tasks of the shard
	// that have not ended as far as is known.
	MayRepeat int
	// NotUTF8 are tasks of builds before the first release whose names, keys or headers are not
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

// Verify reads everything in the directory of a closed queue, and reports damage and
// contradictions. It checks the seals that [Queue.Close] leaves, the checksum of every block, the
// order of Pebble's levels, whether records, index, counters, leases and all other entries agree,
// and, unless it is a node's, whether the shards do, which [Open] corrects after a power loss.
// Without Repair it changes nothing. It reads everything two or three times, one shard after the
// other, and takes some 300 bytes of memory for each task of the shard, a repair twice as much.
//
// An error says why the directory could not be verified; it matches [ErrCorrupt] if the manifest of
// the queue is damaged. Problems in the report are not returned as an error.
//
// A repair is all or nothing for each shard, whenever it is interrupted; the next repair starts
// again, and [Open] finishes one that was complete.
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
		r.Shards = append(r.Shards, ShardReport{
			Sealed: s.Sealed, Files: s.Files, Bytes: s.Bytes,
			Tasks: Counts(s.Tasks), Kept: s.Kept, MayRepeat: s.MayRepeat,
		})
		for _, id := range s.NotUTF8 {
			last := &r.Shards[len(r.Shards)-1]
			last.NotUTF8 = append(last.NotUTF8, id)
		}
	}
	for _, p := range found.Problems {
		r.Problems = append(r.Problems, Problem(p))
	}
	return r
}
