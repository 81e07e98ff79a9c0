// Package manifest is a queue's directory: its content, the file that describes it, and the lock
// that is held while the queue is open.
package manifest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"

	"codeq/internal/base"
)

// A queue's directory holds
//
//	CODEQ       the manifest: format, shard count, identity
//	LOCK        locked while the queue is open
//	shard-NNN/  one Pebble store for each shard
//
// The kernel's lock of LOCK belongs to the open file. Where it can only belong to the process, the
// process must not open and close LOCK once more, which would release it.
const (
	Name     = "CODEQ"
	TempName = "CODEQ.tmp" // about to be renamed to CODEQ
	LockName = "LOCK"
)

// Further files of a node of a cluster, besides the stores of its shards and the MetaDir of each.
const (
	RaftDir   = "raft"
	VotesFile = "votes"
)

// OldestFormat is the oldest format that Open upgrades, in place, to Format: first the manifest, so
// that older versions refuse the directory, then the identity of each shard. The additions of a
// format are optional, so a crash between the two steps, or a shard without a write since, does no
// harm.
//
// Open does not upgrade the directory of a node: the nodes of a cluster run different builds during
// an upgrade, and change the format together (internal/cluster, upgrade.go). Until then they have
// OldestOfNodes or a later format; every build in such a cluster knows it.
//
// Pebble's format also follows from that of the directory (PebbleFormat).
const (
	OldestFormat  = 7
	OldestOfNodes = 7
)

// pebbleFormats has the format of Pebble for the stores of a directory and the logs of its node, by
// the format of the directory, from OldestFormat on. None is lower than the previous one, and none
// is newer than internal/failstop allows.
var pebbleFormats = [...]uint64{
	19, // of 7: pebble.FormatColumnarBlocks
	19, // of 8
	19, // of 9
}

// PebbleFormat returns the format of Pebble (pebble.FormatMajorVersion) for stores in a directory
// of a known format. Pebble upgrades a store to it when it opens the store, and never downgrades.
func PebbleFormat(format int) uint64 { return pebbleFormats[format-OldestFormat] }

// MaxShards is the maximum number of shards of a queue.
const MaxShards = 256

// Manifest describes a directory. It is replaced by a rename.
type Manifest struct {
	Format int    `json:"format"`
	Shards int    `json:"shards"`
	ID     string `json:"id"` // random, and in each of the shards as well
	// Creating is set until every shard exists, and a node belongs to a cluster. Before that
	// nothing is acknowledged, so the shards may be created again, also with another number.
	Creating bool `json:"creating,omitempty"`
	// Open is the place of a queue that may be written, or was not closed; nil: all stores are
	// closed and sealed.
	Open *Place `json:"open,omitempty"`
	// Opening is the number of the last opening for writing, as in the record of each store; 0:
	// none.
	Opening uint64 `json:"opening,omitempty"`
	// Node is the directory's node of a cluster; "": a queue without a cluster.
	Node string `json:"node,omitempty"`
	// Cluster identifies the cluster of the node; "": it belongs to none yet.
	Cluster string `json:"cluster,omitempty"`
	// Former has former IDs of a node's directory; the node may still be a member by them. See
	// Volatile.
	Former []string `json:"former,omitempty"`
	// Volatile is set while a node or standalone queue is open, or was not closed, and acknowledges
	// before its data is on the disk.
	Volatile *Volatile `json:"volatile,omitempty"`
	// Differ is set while the shards of a standalone queue may have states of different times, or
	// were written by a repair or an import, until their data about each other is derived again.
	Differ bool `json:"differ,omitempty"`
	// Options are those of the application's last Open; nil: there was none.
	Options *Options `json:"options,omitempty"`
	// Crashed: a process of a standalone queue has died, and no application has since recovered the
	// running tasks and closed the queue in order.
	Crashed bool `json:"crashed,omitempty"`
	// Founders are the first nodes of the cluster, while this node founds it: until a majority of
	// them has it, in each group.
	Founders []Founder `json:"founders,omitempty"`
	// Drained is set while the node must not lead.
	Drained bool `json:"drained,omitempty"`
	// Left is set while a former node becomes a standalone queue: its stores may still be those of
	// replicas, and its logs may still exist.
	Left bool `json:"left,omitempty"`
	// Incarnation is the number of the last incarnation of the node, see IncarnationAfter.
	Incarnation uint64 `json:"life,omitempty"`
	// Earlier has the earlier numbers of Incarnations.
	Earlier []uint64 `json:"earlier,omitempty"`
	// Seen has the latest seen incarnation of each other node's directory, by its ID.
	Seen map[string]uint64 `json:"seen,omitempty"`
	// Outdated is set when another node has noticed that the directory is an older copy.
	Outdated bool `json:"outdated,omitempty"`
	// Sum is the CRC-32C of the manifest without it, in hexadecimal.
	Sum string `json:"sum"`
}

// Founder is one of the first nodes of a cluster.
type Founder struct {
	Node    string `json:"node"`
	ID      string `json:"id"` // of its directory
	Address string `json:"address"`
}

// Identity returns the value of keys.Meta in the store of a shard.
func (m *Manifest) Identity(index int) string { return m.identityOf(m.Format, index) }

func (m *Manifest) identityOf(format, index int) string {
	return fmt.Sprintf("codeq %d %s %d/%d", format, m.ID, index, m.Shards)
}

// CheckIdentity refuses a store unless its identity is that of a shard in the directory's format,
// or in an older one. Each format has a different identity. old: the store must still be upgraded.
func (m *Manifest) CheckIdentity(index int, got []byte) (old bool, err error) {
	for f := m.Format; f >= OldestFormat; f-- {
		if string(got) == m.identityOf(f, index) {
			return f < Format, nil
		}
	}
	return false, fmt.Errorf("%w: identity %q, expected %q", base.ErrCorrupt, got, m.Identity(index))
}

// CheckStored refuses a store that is neither a shard of this queue nor, if allowed, a replica of
// it. got is nil if nothing was ever stored in a replica.
func (m *Manifest) CheckStored(index int, got []byte) error {
	_, alone := m.CheckIdentity(index, got)
	if m.Node == "" && !m.Left || alone == nil && (m.Left || len(m.Founders) > 0) {
		return alone
	}
	if got == nil {
		return nil
	}
	_, err := ReplicaFormat(index, m.Shards, got)
	return err
}

// ReplicaIdentity is Identity for a replica. It is the same on all nodes.
func ReplicaIdentity(format, index, shards int) string {
	return fmt.Sprintf("codeq %d replicated %d/%d", format, index, shards)
}

// ReplicaFormat returns the format of a replica, by its identity. It refuses an unknown format.
func ReplicaFormat(index, shards int, identity []byte) (format int, err error) {
	_, err = fmt.Sscanf(string(identity), "codeq %d", &format)
	switch {
	case err != nil || string(identity) != ReplicaIdentity(format, index, shards):
		return 0, fmt.Errorf("%w: identity %q, expected %q", base.ErrCorrupt, identity, ReplicaIdentity(Format, index, shards))
	case format < OldestFormat || format > Format:
		return 0, fmt.Errorf("shard %d: %w", index, unknownFormat(format))
	}
	return format, nil
}

// Encode returns the file of a manifest, with its checksum. Equal manifests have equal files.
func (m Manifest) Encode() ([]byte, error) {
	m.Sum = ""
	b, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	m.Sum = fmt.Sprintf("%08x", crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
	b, err = json.Marshal(m)
	return append(b, '\n'), err
}

// decode reads the file of a manifest. It refuses every file that differs from the output of
// Encode.
func decode(b []byte) (*Manifest, error) {
	// In another format, the other fields may have other meanings.
	var version struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(b, &version); err != nil {
		return nil, damaged(err)
	}
	var m Manifest
	err := json.Unmarshal(b, &m)
	misread := false // the checksum matches, so the format is known
	for f := OldestFormat; f <= Format; f++ {
		m.Format = f
		whole, encodeErr := m.Encode()
		if encodeErr != nil {
			return nil, encodeErr
		}
		if err == nil && bytes.Equal(b, whole) {
			return m.check()
		}
		misread = misread || bytes.HasSuffix(b, sumOf(whole))
	}
	if version.Format >= 1 && (version.Format < OldestFormat || version.Format > Format) && !misread {
		return nil, unknownFormat(version.Format)
	}
	return nil, damaged(errors.New("wrong checksum"))
}

// unknownFormat returns the error for an unknown format, with advice.
func unknownFormat(format int) error {
	advice := "open it with a version that knows it"
	if format < OldestFormat {
		advice = fmt.Sprintf("no release has written it; open it once with a build that upgrades it to %d, or begin anew", OldestFormat)
	}
	return fmt.Errorf("%w: %d, this version knows %d to %d: %s", base.ErrFormat, format, OldestFormat, Format, advice)
}

func damaged(err error) error {
	return fmt.Errorf("%w: %s: %w: restore the file from a copy", base.ErrCorrupt, Name, err)
}

// check refuses impossible values.
func (m Manifest) check() (*Manifest, error) {
	if m.Shards < 1 || m.Shards > MaxShards {
		return nil, fmt.Errorf("%w: %s: %d shards", base.ErrCorrupt, Name, m.Shards)
	}
	return &m, nil
}

// sumOf returns the end of an encoded manifest, beginning with its checksum.
func sumOf(encoded []byte) []byte { return encoded[len(encoded)-len(`"01234567"}`)-1:] }
