package peer

import (
	"encoding/binary"
	"fmt"
)

// The nodes of a cluster run different builds of codeq while it is upgraded. Their stored data and
// their messages, except the handshake, depend on formats: a node knows those up to the newest of
// its build, and requires others to know the one that its cluster has risen to. Both sides of a
// connection send both numbers, so that neither sends data that the other does not know.

// Formats are the formats of a node's build, and of its cluster.
type Formats struct {
	Newest int // of its build
	Least  int // required of the others: data from the node may be of this format
}

func (f Formats) valid() bool { return f.Least > 0 && f.Newest >= f.Least }

func (f Formats) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint16(b, uint16(f.Newest))
	return binary.BigEndian.AppendUint16(b, uint16(f.Least))
}

// readFormats reads the first formatsLen bytes.
func readFormats(b []byte) Formats {
	return Formats{int(binary.BigEndian.Uint16(b)), int(binary.BigEndian.Uint16(b[2:]))}
}

// NewestOf is the newest format that a node knows, by the last handshake with its directory; 0 if
// there was none.
func (n *Node) NewestOf(id ID) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.newest[id]
}

// Require makes the node require a format of the others. It ends the connections to nodes that do
// not know it, and the earlier dialed connections of groups: so neither entries nor files of
// snapshots go to a node that has not learned the requirement. Formats only rise.
func (n *Node) Require(format int) {
	n.mu.Lock()
	n.formats.Least = max(format, n.formats.Least)
	var end []*conn
	for c := range n.conns {
		untold := c.dialed && c.said < format && (c.use == 0 || ofGroup(c.use))
		if untold || c.use != 0 && c.newest < format {
			c.untold = untold
			end = append(end, c)
		}
	}
	n.mu.Unlock()
	for _, c := range end {
		_ = c.Close()
	}
}

// say records the formats that this node sends on a connection that it dials.
func (n *Node) say(c *conn) Formats {
	n.mu.Lock()
	defer n.mu.Unlock()
	c.dialed, c.said = true, n.formats.Least
	return n.formats
}

// agree records the formats and incarnations of the other side of a connection, and returns the
// formats of this node. It refuses if the two have no common format, or the other side was refused
// meanwhile. This node first rises to the format that another one of its cluster requires.
func (n *Node) agree(c *conn, use byte, other Identity, theirs Formats, incarnations Incarnations) (ours Formats, refused *RefusedError) {
	n.mu.Lock()
	ours = n.formats
	c.said = max(c.said, theirs.Least) // it knows that already
	n.mu.Unlock()
	if rises := use != useIntroduction && theirs.Least > ours.Least; rises && theirs.Least <= ours.Newest {
		if err := n.c.Raise(theirs.Least); err != nil {
			return ours, &RefusedError{RefusedFormat, fmt.Sprintf("format %d: %v", theirs.Least, err)}
		}
		n.Require(theirs.Least)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	ours = n.formats
	// A stranger may claim any identity, and the IDs of programs never come again.
	if c.dialed || use != useIntroduction && n.c.Groups > 0 {
		n.newest[other.ID] = theirs.Newest
	}
	switch {
	case theirs.Newest < ours.Least:
		refused = refusedFormat(other.Name, theirs.Newest, n.self.Name, ours.Least)
	case theirs.Least > ours.Newest:
		refused = refusedFormat(n.self.Name, ours.Newest, other.Name, theirs.Least)
	default:
		c.use, c.other, c.incarnations, c.newest = use, other.ID, incarnations, theirs.Newest
		if n.precedes(c, other.ID) {
			c.use = 0
			refused = &RefusedError{RefusedCopy, fmt.Sprintf("a later process has the directory of node %q", other.Name)}
		}
	}
	return ours, refused
}

// refusedFormat is the refusal of a node with an older build than the cluster of another one.
func refusedFormat(old string, newest int, node string, least int) *RefusedError {
	return &RefusedError{RefusedFormat, fmt.Sprintf("node %q knows format %d, the cluster of node %q has format %d", old, newest, node, least)}
}
