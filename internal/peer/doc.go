// Package peer connects the nodes of a cluster, over one listener for each node.
//
// A connection begins with a header (header.go) in which its dialer says what it is for: Raft's own
// protocol of one group, for which the bare connection is handed over (Node.Group), or calls.
//
// # Calls
//
// A connection of calls carries requests in one direction and their replies in the other, as frames
// (frame.go), one after the other. So that none waits for one that is much larger, a Node opens up
// to three of them to each node that it calls, as it needs them: for heartbeats and renewals, for
// large requests, and for the rest. Each side has two goroutines for it, whatever the number of
// calls under way: one reads and, on the side that was called, hands requests to the Handler; the
// other one writes all frames that have gathered since its last write at once (stream.go). So
// callers share system calls as soon as there are several of them, and nobody but the writer waits
// for the network.
//
// An error of Call says what is known of the call: ErrNotSent if no handler has seen it and none
// will, ErrLost if one may have, a *RemoteError if the handler has answered with it.
package peer
