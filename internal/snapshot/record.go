package snapshot

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"

	"codeq/internal/platform"
)

const (
	recordName      = "snapshot"
	recordTemp      = "snapshot.tmp"
	incomingPrefix  = "incoming-"
	receivingPrefix = "receiving-"
	sendingPrefix   = "sending-"
	recordFormat    = 1
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// record is the content of the metadata file.
type record struct {
	Format    int
	Sequence  uint64 // N of incoming-N if Installed
	Installed bool   // the state is incoming-N, or that directory renamed, until Swapped
	Meta      raft.SnapshotMeta
}

// meta returns a copy, which Raft may keep.
func (r *record) meta() *raft.SnapshotMeta {
	meta := r.Meta
	meta.Configuration = meta.Configuration.Clone()
	return &meta
}

func incomingName(sequence uint64) string { return fmt.Sprint(incomingPrefix, sequence) }

// readRecord returns nil if there is no metadata file.
func readRecord(fs vfs.FS, dir string) (*record, error) {
	name := fs.PathJoin(dir, recordName)
	data, err := platform.ReadFile(fs, name)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	sum, body, _ := bytes.Cut(data, []byte("\n"))
	if string(sum) != checksumText(body) {
		return nil, fmt.Errorf("%w: wrong checksum of %s", ErrDamaged, name)
	}
	r := new(record)
	if err := json.Unmarshal(body, r); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrDamaged, name, err)
	}
	if r.Format != recordFormat {
		return nil, fmt.Errorf("%s: unknown format %d", name, r.Format)
	}
	return r, nil
}

// writeRecord replaces the metadata file atomically and durably, and makes earlier changes of names
// in dir durable. If it fails with renamed, either the old or the new file is found after a crash.
func writeRecord(fs vfs.FS, dir string, r *record) (renamed bool, err error) {
	body, err := json.Marshal(r)
	if err != nil {
		return false, err
	}
	temp := fs.PathJoin(dir, recordTemp)
	if err := platform.WriteFile(fs, temp, fmt.Appendf(nil, "%s\n%s", checksumText(body), body)); err != nil {
		return false, fmt.Errorf("write %s: %w", temp, err)
	}
	if err := fs.Rename(temp, fs.PathJoin(dir, recordName)); err != nil {
		return false, err
	}
	return true, platform.SyncDirectory(fs, dir)
}

func checksumText(body []byte) string {
	return fmt.Sprintf("%08x", crc32.Checksum(body, castagnoli))
}
