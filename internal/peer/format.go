package peer

import (
	"encoding/binary"
	"fmt"
)

// The builds of codeq that the nodes of a cluster run differ while it is upgraded. What they store,
// and what they say to each other beside the handshake, depends on formats: a node knows those up
// to the newest of its build, and requires that others know the one that its cluster has risen to.
// Both sides of a connection say both numbers, so that neither sends what the other does not know.

// Formats are what a node says of its build, and of its cluster.
type Formats struct {
	Newest int // that its build knows
	Least  int // that the others must know: what they get from it may be of this format
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
// not know it, and those of groups that this one has dialed before: so neither entries nor files of
// snapshots go to a node that has not been told. Formats only rise.
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

// say notes what a connection that this node dials is told of its formats.
func (n *Node) say(c *conn) Formats {
	n.mu.Lock()
	defer n.mu.Unlock()
	c.dialed, c.said = true, n.formats.Least
	return n.formats
}

// agree notes what the other side of a connection has said of its formats and lives, and returns
// the formats of this node, or why the two have none in common, or the other side was refused
// meanwhile. This node first rises to what another one of its cluster requires.
func (n *Node) agree(c *conn, use byte, other Identity, theirs Formats, lives Lives) (ours Formats, refused *RefusedError) {
	n.mu.Lock()
	ours = n.formats
	c.said = max(c.said, theirs.Least) // it need not be told
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
	// A stranger may claim to be anybody, and the IDs of programs never come again.
	if c.dialed || use != useIntroduction && n.c.Groups > 0 {
		n.newest[other.ID] = theirs.Newest
	}
	switch {
	case theirs.Newest < ours.Least:
		refused = refusedFormat(other.Name, theirs.Newest, n.self.Name, ours.Least)
	case theirs.Least > ours.Newest:
		refused = refusedFormat(n.self.Name, ours.Newest, other.Name, theirs.Least)
	default:
		c.use, c.other, c.lives, c.newest = use, other.ID, lives, theirs.Newest
		if n.precedes(c, other.ID) {
			c.use = 0
			refused = &RefusedError{RefusedCopy, fmt.Sprintf("a later process has the directory of node %q", other.Name)}
		}
	}
	return ours, refused
}

// refusedFormat is the refusal of a node whose build is older than the cluster of another one.
func refusedFormat(old string, newest int, node string, least int) *RefusedError {
	return &RefusedError{RefusedFormat, fmt.Sprintf("node %q knows format %d, the cluster of node %q has format %d", old, newest, node, least)}
}
