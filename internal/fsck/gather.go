package fsck

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"strconv"
	"strings"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/batchrepr"
	"github.com/cockroachdb/pebble/v2/sstable"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/wal"

	"codeq/internal/integrity"
	"codeq/internal/store"
)

// gathering is a store made of the entries in all tables and logs of a directory, for a store that
// Pebble does not open because a file is missing or cut short. The entry of a key with the largest
// sequence number counts, even if it is a deletion. Nothing says which tables are obsolete. Their
// entries are older than the entries that replaced them, but compactions set sequence numbers to 0
// when nothing lies below, and drop deletions. So a deletion hides an entry with number 0 only if
// its file is the newer one. A deleted entry may come back if only its obsolete table is left: such
// tasks are delivered again.
type gathering struct {
	fs     vfs.FS
	db     *pebble.DB // key: version, value
	ranges []rangeDeletion
}

// version precedes the value of an entry of a gathering.
type version struct {
	seq  uint64
	file uint64
	kind pebble.InternalKeyKind
}

const versionLen = 8 + 8 + 1

type rangeDeletion struct {
	from, to []byte
	version
}

func (v version) append(dst []byte) []byte {
	dst = binary.BigEndian.AppendUint64(dst, v.seq)
	return append(binary.BigEndian.AppendUint64(dst, v.file), byte(v.kind))
}

func parseVersion(b []byte) version {
	return version{binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:]), pebble.InternalKeyKind(b[16])}
}

func (v version) deletes() bool {
	switch v.kind {
	case pebble.InternalKeyKindDelete, pebble.InternalKeyKindSingleDelete, pebble.InternalKeyKindDeleteSized, pebble.InternalKeyKindRangeDelete:
		return true
	default:
		return false
	}
}

// hides reports whether v counts rather than o, another version of the key.
func (v version) hides(o version) bool {
	switch {
	case v.deletes() && !o.deletes() && o.seq == 0:
		return v.file > o.file
	case !v.deletes() && v.seq == 0 && o.deletes():
		return v.file > o.file
	case v.seq != o.seq:
		return v.seq > o.seq
	}
	return v.file > o.file
}

// gather reads the tables and logs of a directory into an open, empty store, and leaves the entries
// there that count.
func gather(fsys vfs.FS, dir string, into *pebble.DB) error {
	g := gathering{fs: fsys, db: into}
	names, err := fsys.List(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		number, table := strings.CutSuffix(name, integrity.TableSuffix)
		if !table {
			continue
		}
		n, err := parseFileNumber(number)
		if err != nil {
			continue
		}
		if err := store.Protect(func() error { return g.table(fsys.PathJoin(dir, name), n) }); err != nil && store.IsIOError(err) {
			return err
		}
	}
	logs, err := wal.Scan(wal.Dir{FS: fsys, Dirname: dir})
	if err != nil {
		return err
	}
	for _, l := range logs {
		if err := store.Protect(func() error { return g.log(l) }); err != nil && store.IsIOError(err) {
			return err
		}
	}
	return g.reduce()
}

// parseFileNumber reads the name of a table or a log, without its suffix.
func parseFileNumber(name string) (uint64, error) { return strconv.ParseUint(name, 10, 64) }

// table adds the readable entries of a table. After a damaged block it continues backwards from the
// end.
func (g *gathering) table(path string, number uint64) error {
	r, err := store.OpenTable(g.fs, path)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }() // nothing was written
	deletions, err := r.NewRawRangeDelIter(context.Background(), sstable.NoFragmentTransforms, sstable.NoReadEnv)
	if err == nil && deletions != nil {
		for span, err := deletions.First(); span != nil && err == nil; span, err = deletions.Next() {
			for _, k := range span.Keys {
				g.deleteRange(span.Start, span.End, version{uint64(k.SeqNum()), number, pebble.InternalKeyKindRangeDelete})
			}
		}
		deletions.Close()
	}
	it, err := r.NewIter(sstable.NoTransforms, nil, nil, sstable.AssertNoBlobHandles)
	if err != nil {
		return err
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	visit := func(kind pebble.InternalKeyKind, seq uint64, key, value []byte) error {
		return g.add(bytes.Clone(key), version{seq, number, kind}, value)
	}
	for kv := it.First(); kv != nil; kv = it.Next() {
		value, _, err := kv.Value(nil)
		if err != nil {
			break
		}
		if err := visit(kv.Kind(), uint64(kv.SeqNum()), kv.K.UserKey, value); err != nil {
			return err
		}
	}
	if it.Error() == nil {
		return nil
	}
	for kv := it.Last(); kv != nil; kv = it.Prev() {
		value, _, err := kv.Value(nil)
		if err != nil {
			break
		}
		if err := visit(kv.Kind(), uint64(kv.SeqNum()), kv.K.UserKey, value); err != nil {
			return err
		}
	}
	return it.Error()
}

// log adds the records of a log up to its end or the first one that cannot be read.
func (g *gathering) log(l wal.LogicalLog) error {
	r := l.OpenForRead()
	defer func() { _ = r.Close() }() // nothing was written
	for {
		record, _, err := r.NextRecord()
		if err != nil {
			return nil // io.EOF, or a torn end as a crash leaves it
		}
		b, err := io.ReadAll(record)
		if err != nil {
			return nil
		}
		header, ok := batchrepr.ReadHeader(b)
		if !ok {
			return nil
		}
		seq := uint64(header.SeqNum)
		for entries := batchrepr.Read(b); ; {
			kind, key, value, ok, err := entries.Next()
			if err != nil || !ok {
				break
			}
			if kind == pebble.InternalKeyKindLogData {
				continue // has no number
			}
			v := version{seq, uint64(l.Num), kind}
			seq++
			if kind == pebble.InternalKeyKindRangeDelete {
				g.deleteRange(key, value, v)
			} else if err := g.add(key, v, value); err != nil {
				return err
			}
		}
	}
}

func (g *gathering) deleteRange(from, to []byte, v version) {
	g.ranges = append(g.ranges, rangeDeletion{bytes.Clone(from), bytes.Clone(to), v})
}

// add keeps a version of a key if it hides the one that is known.
func (g *gathering) add(key []byte, v version, value []byte) error {
	if v.kind != pebble.InternalKeyKindSet && v.kind != pebble.InternalKeyKindSetWithDelete && !v.deletes() {
		return nil
	}
	old, err := store.Lookup(g.db, key)
	if err != nil {
		return err
	}
	if old != nil && !v.hides(parseVersion(old)) {
		return nil
	}
	return g.db.Set(key, append(v.append(nil), value...), pebble.NoSync)
}

// reduce keeps the values that count and are not deleted.
func (g *gathering) reduce() error {
	it, err := g.db.NewIter(nil)
	if err != nil {
		return err
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	for valid := it.First(); valid; valid = it.Next() {
		b, err := it.ValueAndErr()
		if err != nil {
			return err
		}
		v := parseVersion(b)
		gone := v.deletes()
		for _, d := range g.ranges {
			gone = gone || bytes.Compare(d.from, it.Key()) <= 0 && bytes.Compare(it.Key(), d.to) < 0 && d.hides(v)
		}
		if gone {
			err = g.db.Delete(it.Key(), pebble.NoSync)
		} else {
			err = g.db.Set(it.Key(), b[versionLen:], pebble.NoSync)
		}
		if err != nil {
			return err
		}
	}
	return it.Error()
}
