package peer

import (
	"errors"
	"fmt"
)

// Errors of Call, for errors.Is.
var (
	// ErrNotSent means that no handler has seen the call and none will: it may be repeated, there
	// or elsewhere. The error also wraps the reason.
	ErrNotSent = errors.New("peer: not sent")
	// ErrLost means that it is unknown whether a handler has seen the call. The error also wraps
	// the reason: the end of the connection, or the cause of the caller's context.
	ErrLost = errors.New("peer: no reply")
	// ErrClosed is the reason if this Node was closed. A group's Dial returns it too.
	ErrClosed = errors.New("peer: node closed")
)

// Reasons for the end of a connection.
var (
	errSilent   = errors.New("peer: nothing heard, not even the answer to a ping")
	errProtocol = errors.New("peer: protocol violated")
	errUntil    = errors.New("peer: given up")
	errDone     = errors.New("peer: introduced")
	errIdle     = errors.New("peer: closed after nothing was called for a while")
)

// errNoCluster: a node without a cluster can only introduce itself.
var errNoCluster = errors.New("peer: this node is of no cluster yet")

// RemoteError is the answer of a Handler by Fail.
type RemoteError struct {
	Code byte // the Handler's, or codePeer
	Text string
}

// codePeer is the Code of a RemoteError that no Handler chose: a reply exceeds MaxBody, the
// connection has Bounds.Calls already, or that Node has no Handler.
const codePeer byte = 0xff

// CodeBusy is the Code of a RemoteError for a call that was not handled because its connection has
// Bounds.Calls already.
const CodeBusy byte = 0xfe

func (e *RemoteError) Error() string { return fmt.Sprintf("peer: remote error %d: %s", e.Code, e.Text) }

// Reason says why a connection was refused.
type Reason byte

const (
	RefusedVersion Reason = 1 + iota // another version of the protocol
	RefusedGroups                    // another number of groups
	RefusedGroup                     // a group that the other side does not have
	RefusedCluster                   // another cluster
	RefusedNode                      // another node, or none, has the address, or another directory the name
	RefusedName                      // the certificate is not for the name of the node
	RefusedFormat                    // the build of one is older than the cluster of the other
	RefusedCopy                      // the directory of the dialer is an older copy
	RefusedBusy                      // there are Bounds.Connections already
	RefusedEarly                     // another process may still have the directory of the dialer open
	RefusedTLS                       // one of the two uses TLS, and the other one does not
)

// lastReason is the last one that later versions may have; no text begins with such a byte.
const lastReason Reason = ' ' - 1

// RefusedError is the answer of a node that refuses a connection of this one. It refuses until one
// of the two is configured differently.
type RefusedError struct {
	Reason Reason
	Text   string // for people, from the node that refused
}

func (e *RefusedError) Error() string { return "peer: connection refused: " + e.Text }
