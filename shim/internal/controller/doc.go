// Package controller mediates between Holdfast and controller plugins. A Mediator creates, registers, expands, deletes and forgets
// volumes, and attaches them to nodes where their plugin wants that (ControllerPublishVolume).
//
// Every call that changes something has a durable intent before it and a durable result after it. A volume is a record before the
// plugin is asked for it (state creating), so a volume that a plugin made while nobody listened is found again by asking for the
// same name. It stays a record until the plugin said that it is gone (state deleting).
//
// An expansion has two halves. That of the node is recorded as pending in the commit that says that the controller is done, and is the
// node's package's to do (Node); a plugin may have the one half, the other, or both.
//
// Optional calls and fields are sent only where the plugin announced them; what is taken down follows what was recorded when it
// was put up. A node is never detached without its id: an empty one would mean all nodes. What a plugin answers is checked before
// it is stored.
//
// A controller that something durable tells of is waited for: while it is away, nothing is put up without being attached.
//
// Calls for one volume are never concurrent: whoever calls Attach and Detach holds the volume's lane, and all else takes it. Run drives
// to its end what nobody waits for any more. Nothing here touches a mount.
package controller
