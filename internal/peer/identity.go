package peer

import (
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/hashicorp/raft"
)

// ID identifies a cluster, or the directory of a node, uniquely for all time. The zero ID is none.
type ID [16]byte

// ParseID is the inverse of ID.String.
func ParseID(s string) (id ID, err error) {
	if s == "" {
		return id, nil
	}
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(id) {
		return id, fmt.Errorf("peer: %q is no ID", s)
	}
	return ID(b), nil
}

// String is the ID in hexadecimal; "" if there is none.
func (id ID) String() string {
	if id == (ID{}) {
		return ""
	}
	return hex.EncodeToString(id[:])
}

// Identity identifies a node.
type Identity struct {
	Cluster ID     // zero: none yet
	ID      ID     // of its directory
	Name    string // of at most 255 bytes
}

// String is for people.
func (i Identity) String() string {
	return fmt.Sprintf("node %q (%s, of cluster %s)", i.Name, orNone(i.ID), orNone(i.Cluster))
}

func orNone(id ID) string {
	if id == (ID{}) {
		return "none"
	}
	return id.String()[:8]
}

// Target is the destination of a connection. Only the intended node accepts it.
type Target struct {
	ID      ID // of its directory
	Name    string
	Address string
}

// RaftAddress is the target in Raft's transport; the Dial of Group decodes it.
func (t Target) RaftAddress() raft.ServerAddress {
	return raft.ServerAddress(t.ID.String() + targetSeparator + t.Name + targetSeparator + t.Address)
}

const targetSeparator = "\x00"

func targetOf(a raft.ServerAddress) (t Target, err error) {
	parts := strings.SplitN(string(a), targetSeparator, 2)
	if len(parts) == 2 {
		// An address contains no separator; a name may.
		if at := strings.LastIndex(parts[1], targetSeparator); at >= 0 {
			t.Name, t.Address = parts[1][:at], parts[1][at+1:]
			t.ID, err = ParseID(parts[0])
			return t, err
		}
	}
	return t, fmt.Errorf("peer: %q is no target", a)
}
