// Package manifest is a queue's directory: its content, the file that describes it, and the lock
// that is held while the queue is open.
package manifest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
)

// A queue's directory holds
//
//	CODEQ       the manifest: format, shard count, identity
//	LOCK        locked while the queue is open
//	shard-NNN/  one Pebble store for each shard
//
// The kernel's lock belongs to the process: if the process that holds it opened and closed LOCK, it
// would release it.
const (
	Name     = "CODEQ"
	TempName = "CODEQ.tmp" // about to be renamed to CODEQ
	LockName = "LOCK"
)

// What a node of a cluster has in its directory beside the stores of its shards, and the MetaDir of
// each.
const (
	RaftDir   = "raft"
	VotesFile = "votes"
)

// OldestFormat is the oldest format that Open upgrades, in place, to Format: first the manifest, so
// that versions that do not know the format refuse the directory, then the identity of each shard.
// What a format adds to the one before it may be missing, so a crash between the two steps, and a
// shard that was not written since, do no harm.
//
// Open does not upgrade the directory of a node: the nodes of a cluster run different builds while
// they are upgraded, and rise together (internal/cluster, upgrade.go). Until then they are of
// OldestOfNodes or later, which every build knows that may be among them.
//
// Pebble's format is by that of the directory, too (PebbleFormat).
const (
	OldestFormat  = 7
	OldestOfNodes = 7
)

// pebbleFormats are the formats of Pebble in which the stores of a directory and the logs of its
// node are written, by the format of the directory, from OldestFormat on. None is lower than the
// one before, and none is newer than internal/failstop allows.
var pebbleFormats = [...]pebble.FormatMajorVersion{
	pebble.FormatColumnarBlocks, // 7
	pebble.FormatColumnarBlocks, // 8
}

// PebbleFormat is the format of Pebble with which stores are opened in a directory of a format that
// this build knows. Pebble raises a store to it when it opens the store, and lowers none.
func PebbleFormat(format int) pebble.FormatMajorVersion { return pebbleFormats[format-OldestFormat] }

// MaxShards is how many shards a queue may have.
const MaxShards = 256

// Manifest says what a directory is. It is replaced by a rename.
type Manifest struct {
	Format int    `json:"format"`
	Shards int    `json:"shards"`
	ID     string `json:"id"` // random, and in each of the shards as well
	// Creating is set until every shard exists, and a node is of a cluster. Before then nothing was
	// acknowledged, so that the shards may be created again, and be of another number.
	Creating bool `json:"creating,omitempty"`
	// Open is the place of a queue whose stores may be written, or that was not closed; nil: all
	// stores are closed and sealed.
	Open *Place `json:"open,omitempty"`
	// Opening is the number of the last opening in which stores might be written, as in the record
	// of each of them; 0: none has such a number.
	Opening uint64 `json:"opening,omitempty"`
	// Node of the cluster to which the directory belongs; "": a queue without a cluster.
	Node string `json:"node,omitempty"`
	// Cluster identifies the cluster of the node; "": it is of none yet.
	Cluster string `json:"cluster,omitempty"`
	// Former is the ID that the directory of a node had, by which it may still be a member; see
	// Volatile.
	Former []string `json:"former,omitempty"`
	// Volatile is set while a node, or a queue by itself, is open, or was not closed, that
	// acknowledges before it is on the disk.
	Volatile *Volatile `json:"volatile,omitempty"`
	// Differ is set while the shards of a queue by itself may be of different moments, until what
	// they know of each other is derived anew.
	Differ bool `json:"differ,omitempty"`
	// Options are those with which the application has last opened the queue; nil: it has not.
	Options *Options `json:"options,omitempty"`
	// Crashed: a process has died with a queue by itself, and no application has taken back since
	// what was at work there, and closed it in order.
	Crashed bool `json:"crashed,omitempty"`
	// Founders are the nodes with which the cluster begins, while this one founds it: until a
	// majority of them knows it, in each group.
	Founders []Founder `json:"founders,omitempty"`
	// Drained is set while the node is to lead nothing.
	Drained bool `json:"drained,omitempty"`
	// Left is set while the queue, which was a node, becomes one by itself: its stores may still be
	// those of replicas, and its logs be there.
	Left bool `json:"left,omitempty"`
	// Incarnation is the number of the last incarnation of the node, see IncarnationAfter.
	Incarnation uint64 `json:"life,omitempty"`
	// Earlier are the lives before it that are among the Lives.
	Earlier []uint64 `json:"earlier,omitempty"`
	// Seen are the latest lives in which the directories of other nodes were seen, by their IDs.
	Seen map[string]uint64 `json:"seen,omitempty"`
	// Outdated is set when another node has noticed that the directory is an older copy.
	Outdated bool `json:"outdated,omitempty"`
	// Sum is the CRC-32C of the manifest without it, in hexadecimal.
	Sum string `json:"sum"`
}

// Founder is a node with which a cluster begins.
type Founder struct {
	Node    string `json:"node"`
	ID      string `json:"id"` // of its directory
	Address string `json:"address"`
}

// Identity returns what the store of a shard has under keys.Meta.
func (m *Manifest) Identity(index int) string { return m.identityOf(m.Format, index) }

func (m *Manifest) identityOf(format, index int) string {
	return fmt.Sprintf("codeq %d %s %d/%d", format, m.ID, index, m.Shards)
}

// CheckIdentity refuses a store whose identity is not that of a shard in the directory's format, or
// in an older one. The identity of each format is different. old says that the store is still to be
// upgraded.
func (m *Manifest) CheckIdentity(index int, got []byte) (old bool, err error) {
	for f := m.Format; f >= OldestFormat; f-- {
		if string(got) == m.identityOf(f, index) {
			return f < Format, nil
		}
	}
	return false, fmt.Errorf("%w: identity %q, expected %q", base.ErrCorrupt, got, m.Identity(index))
}

// CheckStored refuses a store that is neither a shard of this queue nor, where that may be, a
// replica of it. got is nil if nothing was ever stored in a replica.
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

// ReplicaFormat returns the format of a replica, by its identity. It refuses one that this build
// does not know.
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

// Encode returns the file of a manifest, with its checksum. Equal manifests are equal files.
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

// decode reads the file of a manifest. It refuses everything that is not, byte by byte, what Encode
// writes.
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
	misread := false // by its checksum, the file is of a known format
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

// unknownFormat refuses a format that this version does not know, and says what to do.
func unknownFormat(format int) error {
	advice := "open it with a version that knows it"
	if format < OldestFormat {
		advice = fmt.Sprintf("no release has written it; open it once with a build that raises it to %d, or begin anew", OldestFormat)
	}
	return fmt.Errorf("%w: %d, this version knows %d to %d: %s", base.ErrFormat, format, OldestFormat, Format, advice)
}

func damaged(err error) error {
	return fmt.Errorf("%w: %s: %w: put the file back from a copy", base.ErrCorrupt, Name, err)
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
