"""Chunks from a language replica to whoever asked, over a socket of their own beside the remote call.

Ray chooses the replica, carries the question, and tells of its end, its faults and its death. For each token its
streams take two remote messages and an object, a hundred times what a frame on an open connection costs.
"""

from llm_service.replies.listener import Replies, ReplyListener
from llm_service.replies.sender import ReplySenders
from llm_service.replies.wire import ReplyAddress

__all__ = ["Replies", "ReplyAddress", "ReplyListener", "ReplySenders"]
