// Package peer connects the nodes of a cluster, over one listener for each node.
//
// A connection begins with a header (header.go) that states the use: Raft's own protocol of one
// group, which gets the bare connection (Node.Group), or calls.
//
// # Calls
//
// A connection of calls carries requests in one direction and their replies in the other, as frames
// (frame.go), one after the other. So that a small frame does not wait for a much larger one, a
// Node opens up to three connections to each node that it calls, as it needs them: for heartbeats
// and renewals, for large requests, and for the rest. Each side has two goroutines for a
// connection, for any number of calls: one reads and, on the side that was called, passes requests
// to the Handler; the other one writes all frames that have gathered since its last write at once
// (stream.go). So callers share system calls as soon as there are several of them, and only the
// writer waits for the network.
//
// The error of a Call states the fate of the call: ErrNotSent if no handler has seen it and none
// will, ErrLost if one may have, a *RemoteError if the handler has answered with it.
package peer
